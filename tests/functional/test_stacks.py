"""Frameworks' own models of tiny folders with attached layers: policy steps, fine-tuning, LoRA, exports, drafts."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from hf_models import make
from job_forks import worker
from launch import ROOT, learned
from safetensors.torch import load_file
from stack_rows import (
    LENGTH,
    RATE,
    ROWS,
    SEED,
    SPLIT,
    STEPS,
    VOCABULARY,
    WEIGHT,
    accepted,
    accepted_by_transformers,
    write_corpus,
)
from torch import Tensor

pytestmark = pytest.mark.matrix

ENVIRONMENTS = ROOT / ".venv-stacks"
FRAMEWORKS = ("megatron_bridge", "ms_swift")
HEADS = [("qwen3", "new"), ("glm4_moe", "new"), ("glm4_moe", "own"), ("deepseek_v3", "new"), ("deepseek_v3", "own")]
"""Families, and whether the layer is attached to a model without MTP layers or is the folder's own."""

LORA = [("megatron_bridge", "own", False), ("megatron_bridge", "new", True), ("ms_swift", "own", True)]
"""The last value: whether the layer drafts the new data better than the old layer; Bridge's targets omit its
projection.
"""

COPIES = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
"""Copies of the trunk's embedding and head, in GLM-4.5 folders."""

LINES = {"tuned on": (5, 7), "adapted to": (7, 3)}
"""Factor and constant of the sequences, by their use."""

TRAIN = (
    f"--use-checkpoint-args --finetune --no-load-optim --no-load-rng --seed {SEED} --split {SPLIT} "
    f"--micro-batch-size {ROWS} --global-batch-size {ROWS} --seq-length {LENGTH} --train-iters {STEPS} "
    f"--save-interval {STEPS} --eval-interval {STEPS} --eval-iters 1 --num-workers 0 "
    f"--lr {RATE} --lr-decay-style constant --weight-decay 0 --adam-beta2 0.999 --mtp-lr {RATE} --mtp-clip-grad 1 "
    f"--mtp-loss-scaling-factor {WEIGHT} --moe-token-dispatcher-type allgather "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY + 1}"
).split()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return prefixes of the corpora of LINES."""
    return {name: write_corpus(tmp_path_factory.mktemp("corpus") / "rows", line) for name, line in LINES.items()}


def needs(framework: str) -> None:
    if not (ENVIRONMENTS / framework / "installed.txt").is_file():
        pytest.skip(f"{framework} is not installed; run bash scripts/test_stacks.sh {framework}")


def with_modules(*folders: Path) -> dict[str, str]:
    """Return the environment of a Python program that imports modules from these folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


Worked = Callable[[str, str, Path, Path, Path, str], dict[str, Any]]


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worked]:
    """Return a function that runs a job in its framework's process: stack_worker.py."""
    logs, workers = tmp_path_factory.mktemp("frameworks"), dict[str, Callable[..., dict[str, Any]]]()
    with ExitStack() as ending:

        def record_of(job: str, framework: str, folder: Path, corpus: Path, out: Path, head: str) -> dict[str, Any]:
            if framework not in workers:
                command = [sys.executable, str(Path(__file__).parents[1] / "support" / "stack_worker.py"), framework]
                environment = with_modules(ENVIRONMENTS / framework, ROOT, ROOT / "tests" / "support")
                environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # no pyarrow thread before forking
                workers[framework] = ending.enter_context(worker(command, environment, logs / framework))
            return workers[framework](job, *map(str, (folder, corpus, out)), head)

        yield record_of


def converted(folder: Path, checkpoint: Path) -> Path:
    from megatron_mtp.megatron.runtime import prepare

    prepare()  # here, because it would import Megatron for every test of this folder
    from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
    from megatron_mtp.checkpoint.convert.stream import Options

    hf_to_mcore(folder, checkpoint, Options(quiet=True, workers=1))
    return checkpoint


def trained(folder: Path, corpus: Path, tmp_path: Path) -> tuple[Path, list[float]]:
    """Return the checkpoint of `megatron-mtp train` from a folder, and the layer's first and last loss."""
    start, saved, metrics = converted(folder, tmp_path / "start"), tmp_path / "saved", tmp_path / "metrics"
    paths = ("--load", start, "--save", saved, "--mtp-metrics-dir", metrics, "--data-path", corpus)
    launch.run(launch.python("pretrain_gpt.py", *TRAIN, *map(str, paths)), tmp_path / "train.log")
    losses = [step["mtp_1 loss"] for step in learned(metrics).values()]
    assert len(losses) == STEPS
    return saved, [losses[0], losses[-1]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("family", "head"), HEADS)
def test_attached_layers_of_a_framework_draft_as_those_of_our_trainer(
    framework: str, family: str, head: str, corpora: dict[str, Path], worked: Worked, tmp_path: Path
) -> None:
    needs(framework)
    changes = {} if family == "qwen3" else {"n_shared_experts": 1}  # Bridge's GLM-4.5 has one
    folder = make(tmp_path / "hf", family, int(head == "own"), changes=changes)
    record = worked("tune", framework, folder, corpora["tuned on"], tmp_path / "out", head)
    record["accepted"] = accepted(converted(tmp_path / "out" / "tuned", tmp_path / "tuned"), LINES["tuned on"])
    record["accepted by transformers"] = accepted_by_transformers(tmp_path / "out" / "tuned", LINES["tuned on"])
    checkpoint, losses = trained(tmp_path / "out" / "start", corpora["tuned on"], tmp_path)
    record["accepted after megatron-mtp train"] = accepted(checkpoint, LINES["tuned on"])
    print(json.dumps({"family": family, "head": head, **record}))
    assert record["differ"] == []  # gradients and weights of the policy in three steps
    assert record["learned"] > 0
    assert record["lost without"]
    assert record["losses"][1] < record["losses"][0] / 2
    assert record["losses"] == pytest.approx(losses, rel=1e-4)
    assert record["unequal"] == []  # the framework's export and this package's
    assert record["accepted"] == record["accepted after megatron-mtp train"] > 0
    assert record["accepted by transformers"] == record["accepted"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_framework_trains_a_drafter_with_a_bit_identical_trunk(
    framework: str, kind: str, corpora: dict[str, Path], worked: Worked, tmp_path: Path
) -> None:
    """The trunk as exported by the framework and the drafter's folder draft together."""
    needs(framework)
    folder, out = make(tmp_path / "hf", "qwen3", 0, changes={"num_hidden_layers": 5}), tmp_path / "out"
    record = worked("drafter", framework, folder, corpora["tuned on"], out, kind)
    from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter
    from megatron_mtp.checkpoint.convert.stream import Options

    trunk, quiet = converted(out / "trunk", tmp_path / "trunk"), Options(quiet=True, workers=1)
    plan_attaching_drafter(trunk, out / "drafter").write(tmp_path / "joined", quiet)
    record["accepted"] = accepted(tmp_path / "joined", LINES["tuned on"], kind)
    print(json.dumps({"kind": kind, **record}))
    assert record["differ"] == []  # gradients and weights of the trunk
    assert record["learned"] > 0
    assert record["losses"][1] < 0.7 * record["losses"][0]
    assert record["accepted"] > 0


@pytest.fixture(scope="module")
def tuned(corpora: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder whose MTP layer drafts the first line."""
    scene = tmp_path_factory.mktemp("tuned")
    folder = make(scene / "hf", "glm4_moe", 1, changes={"n_shared_experts": 1})
    checkpoint, _ = trained(folder, corpora["tuned on"], scene)
    from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
    from megatron_mtp.checkpoint.convert.hf_form import form_of
    from megatron_mtp.checkpoint.convert.stream import Options

    mcore_to_hf(checkpoint, scene / "tuned", Options(quiet=True), form_of(checkpoint, like=folder))
    return scene / "tuned"


@pytest.mark.parametrize(("framework", "head", "follows"), LORA)
def test_lora_keeps_attached_layers_and_lost_ones_can_be_grafted(
    framework: str, head: str, follows: bool, corpora: dict[str, Path], tuned: Path, worked: Worked, tmp_path: Path
) -> None:
    needs(framework)
    line = LINES["adapted to"]
    record = worked("lora", framework, tuned, corpora["adapted to"], tmp_path / "out", head)
    from megatron_mtp.checkpoint.convert.graft import plan_graft
    from megatron_mtp.checkpoint.convert.stream import Options

    quiet = Options(quiet=True, workers=1)
    plan_graft(tuned, tmp_path / "out" / "lost", quiet).write(tmp_path / "grafted", quiet)
    record["accepted"] = accepted(converted(tmp_path / "out" / "kept", tmp_path / "kept"), line)
    record["accepted of the graft"] = accepted(tmp_path / "grafted", line)
    print(json.dumps({"head": head, **record}))
    assert record["differ"] == []  # gradients and weights of the trunk's adapters, and the frozen trunk
    assert record["changed"] == []  # merged tensors of the trunk
    assert record["learned"] > 0
    assert record["lost"]
    assert all(".layers.3." in name for name in record["lost"])  # after the trunk's last layer
    assert record["losses"][1] < record["losses"][0]
    assert min(record["accepted"], record["accepted of the graft"]) > 0
    if follows:
        assert record["accepted"] > record["accepted of the graft"]


@pytest.mark.parametrize(("family", "head"), [("qwen3", "new"), ("glm4_moe", "own"), ("qwen3", "dspark")])
def test_verl_trains_the_layers_with_a_bit_identical_policy(family: str, head: str, tmp_path: Path) -> None:
    """verl's Megatron engine, original and patched; the folder's own layer is loaded, and sent for rollouts.

    The line `heads = [...]` of the patch selects the drafter.
    """
    needs("megatron_bridge")
    needs("verl")
    changes = {"num_hidden_layers": 5} if head == "dspark" else {"n_shared_experts": 1} if head == "own" else {}
    folder = make(tmp_path / "hf", family, int(head == "own"), changes=changes)
    shutil.copytree(ENVIRONMENTS / "verl" / "verl", tmp_path / "patched" / "verl")
    subprocess.run(["git", "apply", ROOT / "integrations" / "verl.patch"], cwd=tmp_path / "patched", check=True)
    if head == "dspark":
        file = tmp_path / "patched" / "verl" / "utils" / "megatron_utils.py"
        drafter = 'heads = [Head(MTPConfig(drafter="dspark", drafter_steps=3, drafter_layers=(1, 2)))]'
        drafter += "\n            from integrations.megatron_bridge import skip_unnamed_parameters"
        drafter += "\n            skip_unnamed_parameters()"
        file.write_text(re.sub(r"heads = \[Head\(.*\)\]", drafter, file.read_text()))
    found: list[dict[str, Tensor]] = []
    for paths in ((), (tmp_path / "patched",)):
        out = tmp_path / f"{len(found)}.safetensors"
        installed = (ENVIRONMENTS / "verl", ENVIRONMENTS / "megatron_bridge", ROOT)
        worker = Path(__file__).parents[1] / "support" / "verl_worker.py"
        command = [sys.executable, str(worker), str(folder), str(out)]
        environment = with_modules(*paths, *installed)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(load_file(out))
    plain, patched = found
    module = "drafter_dspark." if head == "dspark" else "mtp."
    assert [name for name in plain if f" of {module}" in name] == []
    assert [name for name, value in plain.items() if not torch.equal(patched[name], value)] == []
    layer = [name.removeprefix("start of ") for name in patched if name.startswith(f"start of {module}")]
    assert len(layer) == {"new": 12, "own": 26, "dspark": 47}[head]
    trained = {name for name in layer if patched[f"gradient 0 of {name}"].any()}
    changed = {name for name in layer if not torch.equal(patched[f"weight 2 of {name}"], patched[f"start of {name}"])}
    late = {f"{module}layers.0.markov_w1"} if head == "dspark" else set()  # multiplied by a factor that starts at zero
    assert {*layer} - trained == late
    assert {*layer} - changed == set()
    sent = {name.removeprefix("sent ") for name in patched.keys() - plain.keys() if name.startswith("sent ")}
    if head != "own":
        assert sent == set()
    else:
        own = load_file(folder / "model.safetensors")
        assert {name for name in own if "layers.3." in name} - sent <= COPIES
        projection = "model.layers.3.eh_proj.weight"
        assert torch.equal(patched["start of mtp.layers.0.eh_proj.weight"], own[projection].bfloat16())
        assert torch.equal(patched["weight 2 of mtp.layers.0.eh_proj.weight"], patched[f"sent {projection}"])
