"""Audits of what other software writes: Megatron's own script with its MTP, and transformers."""

from pathlib import Path
from typing import Any

import launch
import pytest
from hf_models import make, read
from transformers import AutoModelForCausalLM

from megatron_mtp.checkpoint.audit.auditing import audit
from megatron_mtp.megatron.parser import CUDA, TE, flags_without

SCRIPT = (Path(__file__).parents[1] / "support" / "users_pretrain_gpt.py").read_text(encoding="utf-8")
ON_A_CPU = """
import os
from megatron_mtp.megatron.runtime import prepare
prepare()
alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
os.environ.update(alone | {name: os.environ[name] for name in alone if name in os.environ})
"""
"""Runs before Megatron is imported; its trainer, model and MTP remain its own."""
RUN = "--train-iters 2 --log-interval 1 --eval-interval 2 --eval-iters 1 --save-interval 2 --ckpt-format torch_dist"

pytestmark = pytest.mark.usefixtures("forked_python")


def pretrained(folder: Path, name: str, *flags: str, processes: int = 1) -> Path:
    """Return what Megatron's own script saves with its own MTP."""
    script = folder / "pretrain_gpt.py"
    script.write_text(ON_A_CPU + SCRIPT, encoding="utf-8")
    machine = dict.fromkeys((*flags_without(CUDA), *flags_without(TE)))
    given = [*launch.TINY_RUN, *RUN.split(), *machine, "--save", str(folder / name), *flags]
    command = launch.python(script, *given) if processes == 1 else launch.torchrun(processes, script, *given)
    launch.run(command, folder / f"{name}.log")
    return folder / name


def alarms(result: dict[str, Any]) -> list[str]:
    return [f"{one['guess']}: {one['says']}" for one in result["findings"] if one["severity"] != "note"]


def test_megatrons_own_mtp_is_described(tmp_path: Path) -> None:
    saved = pretrained(tmp_path, "own", "--untie-embeddings-and-output-weights")
    result = audit(saved)
    assert alarms(result) == []
    (side,) = result["sides"]
    assert side["form"] == "Megatron distributed checkpoint"
    assert side["layers"] == {"config": 2, "files": 2}
    assert side["depths"] == {"config": 2, "files": 2}
    assert (side["model"], side["iteration"], side["tied"]) == ("GPT", 2, False)


@pytest.mark.matrix
def test_another_layout_of_megatrons_own_mtp_is_the_same_model(tmp_path: Path) -> None:
    """Two steps with learning rate 0; the layouts have different amounts of vocabulary padding."""
    flags = ["--make-vocab-size-divisible-by", "128", "--lr", "0", "--min-lr", "0"]
    alone = pretrained(tmp_path, "alone", *flags)
    loaded = ["--load", str(alone), *"--finetune --no-load-optim --no-load-rng".split()]
    both = pretrained(tmp_path, "both", *flags, *loaded, "--tensor-model-parallel-size", "2", processes=2)
    result = audit(alone, both)
    assert alarms(result) == []
    one, other = result["sides"]
    assert one["bytes"] < other["bytes"]
    assert result["compared"]["equal"] == one["tensors"]


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.matrix)])
def test_a_folder_saved_by_transformers_has_lost_its_mtp_layers(family: str, tmp_path: Path) -> None:
    published = make(tmp_path / "published", family, 1)
    AutoModelForCausalLM.from_pretrained(published).save_pretrained(tmp_path / "saved")
    (lost,) = [one for one in audit(tmp_path / "saved")["findings"] if one["severity"] == "error"]
    assert lost["guess"] == "MTP dropped"
    assert lost["says"].startswith("The config says 1 depth, the files hold 0")
    both = audit(published, tmp_path / "saved")
    assert {one["guess"] for one in both["findings"] if one["severity"] == "error"} == {"MTP dropped"}
    assert both["compared"]["equal"] == sum("model.layers.3." not in name for name in read(published))
