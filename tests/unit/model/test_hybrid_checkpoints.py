"""Checkpoints of hybrids: which layers are loaded, and what verbs report about them."""

import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from run_flags import DEPTHS, MOCK, ROPE, _in_no_job, refusal  # noqa: F401
from trained_folders import save

from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.cli import main as cli
from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.model.arguments import MTPModelConfig, config_of
from megatron_mtp.model.build import build
from megatron_mtp.model.stored_arguments import completed
from megatron_mtp.training.arguments import parse_checked_args, set_machine_flags
from megatron_mtp.training.loading import plan_load

PATTERN = "--hybrid-layer-pattern"
MAMBA = "--mamba-head-dim 8 --mamba-state-dim 8"


TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
)


def stored(folder: Path, flags: str, pattern: str | None = None) -> Path:
    """Return a checkpoint of new weights, as a run would leave it."""
    args = parsed([*TINY.split(), *flags.split()], 99)
    args.hybrid_layer_pattern = pattern
    model = build(config_of(completed(args)))
    args.num_layers, args.vocab_size = model.config.num_layers, 99
    return save(model, args, folder)


RUN = "--micro-batch-size 1 --train-iters 1 --eval-interval 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 99"


def parsed_run(flags: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Namespace, MTPModelConfig]:
    """Return the arguments and the model configuration of a command line, on a CPU."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split()])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    set_machine_flags(sys.argv, on_cpu=True)
    return parse_checked_args(cpu.installed())


@pytest.fixture(scope="module")
def hybrid(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("hybrid") / "run", MAMBA, "M-*-/*-/*-")


@pytest.fixture(scope="module")
def gpt(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("gpt") / "run", "--mtp-num-layers 1")


@pytest.fixture(scope="module")
def trunk(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("trunk") / "run", "")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("M-*M/*-/*-", "holds a hybrid model of layers M-*-/*-/*-, and --hybrid-layer-pattern is M-*M/*-/*-; give the"),
        ("M-*-/*E/*E --num-experts 2", "give the same layers for the trunk and for a depth"),
        (None, "holds a hybrid model; give its --hybrid-layer-pattern 'M-*-/*-/*-'"),
    ],
)
def test_a_hybrid_checkpoint_requires_the_same_layers(
    pattern: str | None, says: str, hybrid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = DEPTHS if pattern is None else f"{PATTERN} {pattern}"
    assert says in refusal(f"{ROPE} {MOCK} {MAMBA} {flags} --load {hybrid}", monkeypatch, capsys)


def test_a_drafter_takes_the_place_of_a_hybrids_mtp_layers(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{RUN} --use-checkpoint-args --load {hybrid} --drafter eagle3 --drafter-layers 1 2 3 --seq-length 16"
    args, config = parsed_run(f"{flags} {MOCK}", monkeypatch)
    assert (args.hybrid_layer_pattern, config.absent) == ("M-*-", {"mtp": (0,)})


@pytest.mark.parametrize("pattern", ["*-*-/*-", "*-*-"])
def test_a_gpt_with_mtp_layers_must_be_converted_to_a_hybrid(
    pattern: str, gpt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(f"{ROPE} {MOCK} {PATTERN} {pattern} --load {gpt}", monkeypatch, capsys)
    assert f"--load {gpt} holds a GPT of 2 layers with 1 MTP layers, and {PATTERN} is {pattern}, but MTP" in said
    assert "megatron-mtp convert gpt-to-hybrid" in said


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("*-*-*-", "has 3 of attention; give as many"),
        ("*-*--", "has 3 of an MLP or MoE; give as many"),
        ("*-*-/*-", "make a hybrid checkpoint of it by megatron-mtp convert gpt-to-hybrid"),
    ],
)
def test_a_gpt_is_not_loaded_into_a_pattern_of_another_number_of_layers(
    pattern: str, says: str, trunk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron can load one without MTP layers, and reports what is wrong only after the model is built."""
    said = refusal(f"{ROPE} {MOCK} {PATTERN} {pattern} --load {trunk}", monkeypatch, capsys)
    assert f"--load {trunk} holds a GPT of 2 layers" in said
    assert says in said


@pytest.mark.parametrize("init", [None, "random"])
def test_a_hybrid_without_depths_gets_them_by_mtp_init(
    init: str | None, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", "drop-mtp", str(hybrid), str(tmp_path / "trunk")]) == 0
    flags = f"{ROPE} {MOCK} {MAMBA} {PATTERN} M-*-/*-/*- --load {tmp_path / 'trunk'}"
    if init is None:
        assert "has no MTP weights; give --mtp-init" in refusal(flags, monkeypatch, capsys)
    else:
        words = f"{flags} --mtp-init {init} {RUN} {TINY.replace('--num-layers 2', '')}"
        _, config = parsed_run(words, monkeypatch)
        assert config.absent == {"mtp": (0, 1)}


@pytest.mark.parametrize(
    ("checkpoint", "depths", "says"),
    [
        ("hybrid", 1, "--mtp-num-layers is 1, but --hybrid-layer-pattern M-*-/*-/*- has 2 MTP layers"),
        ("gpt", 2, "--mtp-num-layers asks for 2 MTP layer(s), but the checkpoint"),
        ("gpt", 1, None),
        ("hybrid", 2, None),
    ],
)
def test_a_different_number_of_mtp_layers_is_always_detected(
    checkpoint: str,
    depths: int,
    says: str | None,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron's --use-checkpoint-args takes the checkpoint's number, whatever the flag is."""
    folder = request.getfixturevalue(checkpoint)
    flags = f"{RUN} {MOCK} --use-checkpoint-args --load {folder} --mtp-num-layers {depths}"
    if says is None:
        args, _ = parsed_run(flags, monkeypatch)
        assert args.mtp_num_layers == depths
    else:
        with pytest.raises(ValueError, match=re.escape(says)):
            parsed_run(flags, monkeypatch)


def test_additional_mtp_layers_are_initialized_by_mtp_init(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{RUN} {MOCK} --use-checkpoint-args --load {gpt} --mtp-num-layers 3 --mtp-init random"
    args, config = parsed_run(flags, monkeypatch)
    assert (args.mtp_num_layers, config.absent) == (3, {"mtp": (1, 2)})


def test_a_plan_to_load_changes_no_argument(trunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{RUN} {MOCK} --use-checkpoint-args --load {trunk} --mtp-num-layers 1 --mtp-init random"
    args, config = parsed_run(flags, monkeypatch)
    assert args.finetune, "the one place that applies the plan"
    args.finetune = False
    before = dict(vars(args))
    plan = plan_load(args, config.mtp)
    assert vars(args) == before
    assert (plan.absent, plan.finetune, plan.new_heads) == ({"mtp": (0,)}, True, False)
    (message,) = plan.messages
    assert message.endswith("lacks: --mtp-init random; starting as with --finetune")


@pytest.mark.parametrize("init", ["random", "last-layer"])
def test_attached_mtp_layers_are_added_to_the_pattern(init: str, hybrid: Path, tmp_path: Path) -> None:
    """An MTP layer is the trunk's last attention and its last MLP, whose weights `last-layer` copies."""
    none, new = tmp_path / "none", tmp_path / "new"
    assert cli.main(["convert", "drop-mtp", str(hybrid), str(none)]) == 0
    attach = ["convert", "attach-mtp", str(none), str(new), "--mtp-num-layers", "2", "--mtp-init", init]
    assert cli.main(attach) == 0
    before, after = DistReader(hybrid), DistReader(new)
    args = after.common()["args"]
    assert (args.hybrid_layer_pattern, args.mtp_num_layers) == ("M-*-/*-/*-", 2)
    assert {key: after.shape(key) for key in after.keys} == {key: before.shape(key) for key in before.keys}
    for index, layer in enumerate((2, 3)):
        keys = [key for key in after.keys if key.startswith(f"decoder.layers.{layer}.") and "norm" not in key]
        copies = [
            key.replace(f"decoder.layers.{layer}.", f"mtp.layers.1.mtp_model_layer.layers.{index}.") for key in keys
        ]
        same = [torch.equal(after.read(key), after.read(copy)) for key, copy in zip(keys, copies, strict=True)]
        assert set(same) == {init == "last-layer"}
    load_model(new)


def test_dropped_mtp_layers_are_removed_from_the_pattern(hybrid: Path, tmp_path: Path) -> None:
    assert cli.main(["convert", "drop-mtp", str(hybrid), str(tmp_path / "one"), "--keep", "1"]) == 0
    args = DistReader(tmp_path / "one").common()["args"]
    assert (args.hybrid_layer_pattern, args.mtp_num_layers) == ("M-*-/*-", 1)
    assert cli.main(["convert", "inspect", str(tmp_path / "one")]) == 0


@pytest.mark.parametrize(("flags", "pattern"), [("", "*-*-/*-"), (MAMBA, "M-*-/*-")])
@pytest.mark.usefixtures("megatron")
def test_a_hybrid_without_its_config_says_how_it_can_be_exported(
    flags: str, pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = stored(tmp_path / "run", flags, pattern)
    assert cli.main(["convert", "mcore-to-hf", str(source), str(tmp_path / "folder")]) == 2
    remedy = "apply hybrid-to-gpt if these are a GPT's layers, else give a folder of such a model (--like)."
    said = f"the checkpoint is a hybrid model of layers {pattern}, which no form of a trained model here has; {remedy}"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
