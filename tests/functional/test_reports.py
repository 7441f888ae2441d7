"""Public bug reports of other projects, as commands of this one with the correct result: one row each.

To add a report, add a row to `REPORTS`; a folder that it needs is a function in `FOLDERS`, named in braces.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import launch
import pytest
import torch
from hf_models import make, read, write
from safetensors.torch import save_file

from megatron_mtp.cli.main import main


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        where: the report, or the habit.
        what: what goes wrong elsewhere.
        command: arguments of `megatron-mtp`; {names} are those of `FOLDERS`, and {new} is an unused path.
        status: its exit status.
        says: expected output.
    """

    where: str
    what: str
    command: str
    status: int
    says: str


TRAIN = f"train --dry-run 1 {' '.join(launch.TINY_RUN)}"
REPORTS = (
    Report(
        "areal-project/AReaL#1403",
        "an export leaves out files that hold an MTP tensor, with lm_head and layers of the trunk",
        "convert mcore-to-hf {converted} {new}",
        0,
        "tensors: 165",  # as many as in the folder
    ),
    Report(
        "saving with transformers",
        "the MTP tensors are dropped, and the config still counts them",
        "convert hf-to-mcore {lost} {new}",
        2,
        "has 'num_nextn_predict_layers' 2, but the folder holds no tensor of an MTP layer; fetch or export",
    ),
    Report(
        "vllm-project/llm-compressor#3118, NVIDIA/TensorRT-LLM#17378",
        "MTP tensors lie in a side file that the index does not name, and are not loaded",
        "convert hf-to-mcore {side} {new}",
        0,
        "also read: mtp.safetensors",
    ),
    Report(
        "kekzl/imp#1450",
        "an FP8 head without its scale accepts 0 of 24 drafts, without an error",
        "convert hf-to-mcore {unscaled} {new}",
        2,
        "is FP8 without 'model.layers.3.eh_proj.weight_scale_inv' or 'model.layers.3.eh_proj.weight_scale'",
    ),
    Report(
        "adapters with modules_to_save",
        "a trained head under tie_word_embeddings is lost without a word",
        "convert hf-to-mcore {tied} {new} --dry-run",
        2,
        "'tie_word_embeddings' in config.json makes them one; set it to false",
    ),
    Report(
        "NVIDIA/Megatron-LM 0.19",
        "--rampup-batch-size is ignored without a word",
        f"{TRAIN} --rampup-batch-size 2 2 8",
        2,
        "give --step-batch-size-schedule in its place",
    ),
    Report(
        "THUDM/slime, scripts/models",
        "the older --use-rotary-position-embeddings is refused with MTP",
        f"{TRAIN.replace('--position-embedding-type rope', '')} --use-rotary-position-embeddings",
        0,
        "layout of 1 ranks",
    ),
    Report(
        "ModelZoo's lines for DeepSeek-V3",
        "a plan on a laptop ends with an import of DeepEP",
        f"{TRAIN} --num-experts 4 --moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32 --bf16",
        0,
        "planned as for a machine with DeepEP",
    ),
)


def converted(folder: Path) -> None:
    source = make(folder.with_name("of converted"), "glm4_moe", 2)
    assert main(["convert", "hf-to-mcore", str(source), str(folder)]) == 0


def without_depths(folder: Path) -> None:
    make(folder, "glm4_moe", 2)
    write(folder, {name: one for name, one in read(folder).items() if not is_depth(name)})


def beside(folder: Path) -> None:
    depths = {name: one for name, one in read(make(folder, "glm4_moe", 2)).items() if is_depth(name)}
    write(folder, {name: one for name, one in read(folder).items() if not is_depth(name)})
    save_file(depths, folder / "mtp.safetensors")


def unscaled(folder: Path) -> None:
    name = "model.layers.3.eh_proj.weight"
    tensors = read(make(folder, "glm4_moe", 2))
    write(folder, tensors | {name: tensors[name].to(torch.float8_e4m3fn)})


def tied(folder: Path) -> None:
    keys = json.loads((make(folder, "glm4_moe", 2) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"tie_word_embeddings": True}))


def is_depth(name: str) -> bool:
    return name.startswith(("model.layers.3.", "model.layers.4."))


FOLDERS: dict[str, Callable[[Path], object]] = {
    "converted": converted,
    "lost": without_depths,
    "side": beside,
    "unscaled": unscaled,
    "tied": tied,
}


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.where)
def test_a_report_has_the_right_answer(report: Report, tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in FOLDERS}
    for name, path in paths.items():
        if f"{{{name}}}" in report.command:
            FOLDERS[name](path)
    words = report.command.format(**paths, new=tmp_path / "new").split()
    process = launch.start([sys.executable, "-m", "megatron_mtp", *words], tmp_path / "log")
    status = process.wait(launch.TIMEOUT)
    said = (tmp_path / "log").read_text()
    assert (report.says in said, status) == (True, report.status), said[-2000:]
