"""--mtp-state-cache: training that reads the trunk's states is bit-identical to training that computes them."""

import json
from pathlib import Path

import launch
import pytest
from frequent_corpus import corpus
from safetensors.torch import load_file

from megatron_mtp.megatron.runtime import prepare

prepare()

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type none"
TRUNKS = {
    "dense": "--num-layers 4",
    "experts": f"--num-layers 2 {EXPERTS}",
    "hybrid": "--hybrid-layer-pattern M*M- --mamba-state-dim 16 --mamba-head-dim 16",
}
HEADS = {
    "mtp": "--mtp-num-layers 2 --mtp-init last-layer --mtp-train-only --mtp-loss kd",
    "passes": "--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll 3 --mtp-init random --mtp-train-only "
    "--mtp-loss lk:0.5,e2e_tv:0.5 --mtp-hidden-state-mixing --mtp-token-fraction 0.5",
    "eagle3": "--drafter eagle3 --drafter-steps 2",
    "dspark": "--drafter dspark --drafter-steps 3 --drafter-num-layers 2 --drafter-blocks 8",
}
LAYOUTS = {
    "alone": "",
    "data": "",
    "context": "--context-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "plain tensor": "--tensor-model-parallel-size 2",
    "expert": "--expert-model-parallel-size 2",
}
STEPS = "--train-iters 4 --eval-interval 2 --eval-iters 2"


def train(folder: Path, data: Path, name: str, flags: str, layout: str = "alone", trunk: str = "dense") -> str:
    """Return the log of a run, whose metrics are in `folder/name`."""
    words = [word for word in launch.PLAIN_RUN if word != "--mock-data"]
    at = words.index("--num-layers")
    del words[at : at + 2]
    words += (
        f"{TRUNKS[trunk]} --data-path {data} --split 80,20,0 --log-interval 1 --mtp-metrics-dir {folder / name}".split()
    )
    words += f"--attention-dropout 0 --hidden-dropout 0 {STEPS} {flags} {LAYOUTS[layout]}".split()
    words += [] if "--mtp-acceptance" in flags else ["--mtp-acceptance-interval", "1"]
    ranks = 1 if layout == "alone" else 2
    return launch.run(launch.Command("pretrain_gpt.py", tuple(words), ranks), folder / f"{name}.log")


def figures(folder: Path) -> list[dict[str, float]]:
    """Return every row of metrics.jsonl, without machine-dependent values."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row.keys() - launch.MEASURED} for row in rows]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory, data: Path, pytestconfig: pytest.Config) -> Path:
    """Create a folder with a checkpoint of every trunk of this tier."""
    folder = tmp_path_factory.mktemp("trunks")
    for trunk in TRUNKS if pytestconfig.getoption("--all") else ("dense",):
        saved = f"--save {folder / trunk} --save-interval 4 --mtp-acceptance-interval 0"
        train(folder, data, f"of {trunk}".replace(" ", "_"), saved, trunk=trunk)
    return folder


@pytest.mark.parametrize(
    ("head", "layout", "trunk", "more"),
    [
        pytest.param("mtp", "alone", "dense", "", marks=pytest.mark.matrix),
        ("passes", "alone", "dense", "--dataloader-inter-document-masking"),
        pytest.param("eagle3", "alone", "dense", "--bf16", marks=pytest.mark.matrix),
        pytest.param("dspark", "data", "dense", "", marks=pytest.mark.matrix),
        ("mtp", "context", "dense", "--reset-attention-mask --reset-position-ids --eod-mask-loss"),
        pytest.param("eagle3", "tensor", "dense", "", marks=pytest.mark.matrix),
        pytest.param("dspark", "plain tensor", "dense", "", marks=pytest.mark.matrix),
        pytest.param("mtp", "expert", "experts", "", marks=pytest.mark.matrix),
        pytest.param("eagle3", "alone", "hybrid", "", marks=pytest.mark.matrix),
    ],
)
def test_a_second_run_reads_the_states_of_the_first(
    head: str, layout: str, trunk: str, more: str, trunks: Path, data: Path, tmp_path: Path
) -> None:
    flags = f"--load {trunks / trunk} --finetune {HEADS[head]} {more} --mtp-state-cache {tmp_path / 'states'}"
    ran = [train(tmp_path, data, name, flags, layout, trunk) for name in ("first", "second")]
    assert "the trunk ran for 0 of " not in ran[0]
    assert "the trunk ran for 0 of " in ran[1]
    first, second = (figures(tmp_path / name) for name in ("first", "second"))
    assert len(first) == 6
    assert first == second


@pytest.mark.matrix
def test_another_head_loss_seed_and_length_read_the_same_states(trunks: Path, data: Path, tmp_path: Path) -> None:
    flags = f"--load {trunks / 'dense'} --finetune --mtp-state-cache {tmp_path / 'states'}"
    train(tmp_path, data, "all", f"{flags} {HEADS['mtp']} --train-iters 48")  # an epoch
    log = train(tmp_path, data, "passes", f"{flags} {HEADS['passes']} --seed 7 --train-iters 60")
    assert "the trunk ran for 0 of " in log
    log = train(tmp_path, data, "context", f"{flags} {HEADS['passes']} --train-iters 60", "context")
    assert "the trunk ran for 0 of " in log
    log = train(tmp_path, data, "drafter", f"{flags} {HEADS['eagle3']}")  # it reads hidden layers
    assert "the trunk ran for 0 of " not in log
    log = train(tmp_path, data, "drafter", f"{flags} {HEADS['eagle3']} --mtp-loss ce")
    assert "the trunk ran for 0 of " in log
    columns = {name for file in (tmp_path / "states").glob("*.safetensors") for name in load_file(file)}
    assert columns == {"keys", "loss", "hidden", "layer 1", "layer 2", "layer 3"}


@pytest.mark.matrix
def test_all_heads_of_a_hybrid_trunk_read_the_same_states(trunks: Path, data: Path, tmp_path: Path) -> None:
    flags = f"--load {trunks / 'hybrid'} --finetune --mtp-state-cache {tmp_path / 'states'}"
    train(tmp_path, data, "drafter", f"{flags} {HEADS['eagle3']}", trunk="hybrid")
    with_layer = "--mtp-num-layers 1 --mtp-init last-layer --mtp-train-only --mtp-loss kd"
    log = train(tmp_path, data, "mtp", f"{flags} {with_layer} --hybrid-layer-pattern M*M-/M-", trunk="hybrid")
    assert "the trunk ran for 0 of " in log


def test_cached_states_of_another_run_are_rejected(trunks: Path, data: Path, tmp_path: Path) -> None:
    other = corpus(tmp_path / "other")
    with open(f"{other}.bin", "r+b") as file:
        file.write(b"\1")
    train(
        tmp_path,
        data,
        "first",
        f"--load {trunks / 'dense'} --finetune {HEADS['mtp']} --mtp-state-cache {tmp_path / 's'}",
    )
    for flags, given, said in (
        (f"--load {trunks / 'dense'} --finetune --seq-length 32", data, "another --seq-length (64, here 32)"),
        (f"--load {trunks / 'dense'} --finetune --bf16", data, "another precision (float32, here bfloat16)"),
        (f"--load {trunks / 'dense'} --finetune", other, "another corpus ("),
        (f"--load {trunks / 'dense'} --finetune --rotary-base 500", data, "another trunk, or a trunk in another tenso"),
    ):
        with pytest.raises(AssertionError) as end:
            train(tmp_path, given, "second", f"{flags} {HEADS['mtp']} --mtp-state-cache {tmp_path / 's'}")
        assert f"error: --mtp-state-cache is {tmp_path / 's'}, whose states are of {said}" in str(end.value)
