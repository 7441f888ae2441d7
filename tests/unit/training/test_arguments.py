"""Bad input ends the program with one sentence before a model is built; this machine's flags are added and printed."""

import contextlib
import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from megatron.core.dist_checkpointing import ShardedTensor
from run_flags import DEPTHS, MOCK, MODEL, ROPE, _in_no_job, refusal  # noqa: F401  # a fixture

from megatron_mtp.cli import main as cli
from megatron_mtp.cli.train import EXAMPLES
from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.checkpoint import reader
from megatron_mtp.megatron.checkpoint.reader import StoredDepths
from megatron_mtp.megatron.parser import APEX, CUDA, TE, flags_without
from megatron_mtp.spec.config import MTPConfig
from megatron_mtp.training import arguments
from megatron_mtp.training.arguments import parse_checked_args, parse_run_args, set_machine_flags
from megatron_mtp.training.flags import add_mtp_arguments
from megatron_mtp.training.run import main

SHARES = "--mtp-repeated-layer-shares-kv"
FIRST_PASS = "--mtp-repeated-layer-first-pass-kv"


def test_a_run_that_could_not_save_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(f"{ROPE} {MOCK} {DEPTHS} --save /proc/nowhere --save-interval 9", monkeypatch, capsys)
    assert "--save is /proc/nowhere, which cannot be written (No such file or directory); give another folder." in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            f"{ROPE} {MOCK} --num-layers 4 {DEPTHS} --pipeline-model-parallel-layout EttttmL",
            "--pipeline-model-parallel-layout has another number of m than 2; give an m for each",
        ),
        (f"{ROPE} {MOCK} {DEPTHS} --save runs/x", "--save is runs/x, but --save-interval is missing"),
        (f"{ROPE} {MOCK} --mtp-num-layers -1", "--mtp-num-layers is -1; give 1 or more"),
        (
            f"{ROPE} {MOCK} {DEPTHS} --cuda-graph-impl local",
            "--cuda-graph-impl was given on a machine without a CUDA device, but layers of trunk and MTP are",
        ),
        (
            f"{ROPE} {MOCK} {DEPTHS} --cpu-offloading-num-layers=1",
            "--cpu-offloading-num-layers was given on a machine without a CUDA device, but Transformer Engine takes",
        ),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-loss-scaling-factor -0.1", "--mtp-loss-scaling-factor is -0.1; give 0 or more"),
        (
            f"{MOCK} {DEPTHS}",
            "--position-embedding-type is learned_absolute, and MTP layers have no learned positions; give",
        ),
        (f"{ROPE} {MOCK} --rampup-batch-size 2 2 8", "ignores; give --step-batch-size-schedule in its place"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-architecture diagonal", "--mtp-architecture is 'diagonal'; choose one of"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-init zeros", "--mtp-init is 'zeros'; choose one of random, last-layer"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-acceptance-interval -3", "--mtp-acceptance-interval is -3; give 0"),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-architecture parallel --mtp-use-repeated-layer",
            "--mtp-use-repeated-layer was given with --mtp-architecture parallel",
        ),
        (f"{ROPE} {MOCK} --mtp-unroll 3", "--mtp-unroll was given without --mtp-num-layers"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-unroll 3", "--mtp-unroll is 3 without --mtp-use-repeated-layer"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-unroll 0 --mtp-use-repeated-layer", "--mtp-unroll is 0; give 1 or more passes"),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-use-repeated-layer --mtp-unroll 1",
            "--mtp-unroll is 1, which is less than --mtp-num-layers 2; give at least as many",
        ),
        (
            f"{ROPE} {MOCK} --mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll 3 --mtp-loss-weights 1",
            "--mtp-loss-weights is '1'; give 3 numbers of 0 or more (one for each of --mtp-unroll)",
        ),
        (f"{ROPE} {MOCK} {SHARES}", "--mtp-repeated-layer-shares-kv was given without --mtp-num-layers"),
        (f"{ROPE} {MOCK} {DEPTHS} {SHARES}", "was given, but no layer has a second pass that could share; give"),
        (
            f"{ROPE} {MOCK} --mtp-num-layers 1 --mtp-use-repeated-layer {SHARES}",
            "was given, but no layer has a second pass that could share; give",
        ),
        *(
            (f"{ROPE} {MOCK} {DEPTHS} --mtp-use-repeated-layer {SHARES} {given}", f"was given with {named}, where")
            for given, named in (
                ("--multi-latent-attention", "--multi-latent-attention"),
                ("--window-size 8,0", "--window-size"),
                ("--softmax-type learnable", "--softmax-type learnable"),
                ("--recompute-granularity full --recompute-method uniform", "recomputed attention"),
                ("--recompute-granularity selective --recompute-modules core_attn", "recomputed attention"),
            )
        ),
        (f"{ROPE} {MOCK} {DEPTHS} {FIRST_PASS}", f"{FIRST_PASS} was given, but no layer has a second pass"),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-use-repeated-layer {SHARES} {FIRST_PASS}",
            f"{SHARES} and {FIRST_PASS} were given, with a chain of later keys and without; drop one",
        ),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-use-repeated-layer {FIRST_PASS} --window-size 8,0",
            f"{FIRST_PASS} was given with --window-size, where a later pass would leave the window",
        ),
        (f"{ROPE} {MOCK} --hybrid-context-parallel", "--hybrid-context-parallel was given"),
        (
            f"{ROPE} {MOCK} --dataloader-inter-document-masking --context-parallel-size 2",
            "give --reset-attention-mask in its place",
        ),
        (
            f"{ROPE} {MOCK} --dataloader-inter-document-masking --pipeline-model-parallel-size 2 --micro-batch-size 4",
            "--micro-batch-size is 4, but a pipeline takes one packed row at a time; give 1",
        ),
        *(
            (f"{ROPE} {MOCK} {given}", f"{given.split()[0]} was given without --mtp-num-layers; give that")
            for given in (
                "--mtp-loss kd",
                "--mtp-loss-weights 1",
                "--mtp-loss-schedule step --mtp-loss-schedule-steps 3",
                "--mtp-token-fraction 0.5",
                "--mtp-architecture parallel",
                "--mtp-acceptance-interval 1",
                "--mtp-init random",
                "--mtp-label-smoothing 0.1",
                "--mtp-draft-vocab-file x",
                "--mtp-hidden-state-mixing",
                "--mtp-use-repeated-layer",
                "--mtp-detach-heads",
            )
        ),
        *(
            (f"{ROPE} {MOCK} {DEPTHS} {given}", f"{given.split()[0]} is {given.split()[1]}, which --mtp-loss ")
            for given in (
                "--mtp-temperature 2.0",
                "--mtp-lk-eta 2.0",
                "--mtp-lk-eta 2.0 --mtp-loss tv",
                "--mtp-label-smoothing 0.1 --mtp-loss kd",
                "--mtp-z-loss 0.1 --mtp-loss mix --mtp-loss-mix ce=0,tv=1",
            )
        ),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-train-only --mtp-loss-scaling-factor 0",
            "--mtp-loss-scaling-factor is 0, with which --mtp-train-only trains nothing",
        ),
        (f"{ROPE} {MOCK} --mtp-train-only", "--mtp-train-only was given without --mtp-num-layers"),
        (f"{ROPE} {MOCK} --mtp-train-only --mtp-num-layers 0", "--mtp-num-layers 0, which leaves nothing to train"),
        (
            f"{MOCK} --hybrid-layer-pattern *-*-/*- --mtp-num-layers 0",
            "behind its trunk; give --hybrid-layer-pattern '*-*-'.",
        ),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-train-only", "there is no checkpoint of a trunk; give one that exists"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-loss-weights 1,2,3", "--mtp-loss-weights is '1,2,3'; give 2 numbers"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-token-fraction 0", "--mtp-token-fraction is 0.0; give a number above 0"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-draft-vocab-size 0", "--mtp-draft-vocab-size is 0; give 1 or more"),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-draft-vocab-size 1000",
            "--mtp-draft-vocab-size is 1000, and the tokenizer has",
        ),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-draft-vocab-size 9", "counted in local .bin/.idx files (--data-path) alone"),
        (f"{ROPE} {MOCK} --mtp-draft-vocab-size 9", "--mtp-draft-vocab-size was given without --mtp-num-layers"),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-draft-vocab-file /nowhere",
            "--mtp-draft-vocab-file is /nowhere, which is not a list of token ids",
        ),
        (f"{ROPE} {DEPTHS}", "--data-path is missing; give the prefix"),
        (f"{ROPE} {DEPTHS} --data-path /nowhere/corpus", "there is no dataset '/nowhere/corpus'"),
        (
            f"{ROPE} {DEPTHS} --data-path 0.5 a b c",
            "--data-path: there is no dataset '0.5' (0.5.bin and 0.5.idx missing)",
        ),
        (f"{ROPE} {DEPTHS} --data-path a b 0.5 c", "does not hold (--data-path is ['a', 'b', '0.5', 'c'])"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-loss-scaling-factor nan", "--mtp-loss-scaling-factor is nan; give 0 or more"),
        (f"{ROPE} {MOCK} {DEPTHS} --mtp-temperature inf", "--mtp-temperature is inf; give a number from 0.01 to 100"),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-draft-prompts prompts.jsonl 0",
            "--mtp-draft-prompts is prompts.jsonl 0; give a file, and 1 or more prompts.",
        ),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-draft-prompts nowhere",
            "--mtp-draft-prompts: 'nowhere' is not a file; give JSON lines with a key 'prompt'.",
        ),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-state-cache states",
            "--mtp-state-cache states was given, and the trunk is trained, so its states change; give --mtp-train-only",
        ),
        (
            f"{ROPE} {MOCK} {DEPTHS} --mtp-train-only --mtp-state-cache states --pipeline-model-parallel-size 2",
            "but earlier stages would have nothing to do; give 1.",
        ),
        (
            f"{ROPE} {MOCK} --mtp-metrics-dir {__file__}/metrics",
            f"--mtp-metrics-dir is {__file__}/metrics, but {__file__} is a file; name a folder",
        ),
    ],
)
def test_bad_flags_are_rejected_with_a_clear_error(
    flags: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(flags, monkeypatch, capsys)
    assert sentence.startswith("pretrain_gpt.py: error: ")
    assert says in sentence


def test_vocabulary_must_fit_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=DType.optimal_dtype(5000))
    builder.add_document(torch.tensor([1, 2, 4000]), [3])
    builder.finalize(str(tmp_path / "corpus.idx"))
    sentence = refusal(f"{ROPE} {DEPTHS} --data-path {tmp_path}/corpus", monkeypatch, capsys)
    assert "--data-path" in sentence
    assert "4000" in sentence
    assert "vocabulary" in sentence


FULL = "--full-validation --multiple-validation-sets"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = str(tmp_path_factory.mktemp("corpus") / "c")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(99))
    for _ in range(30):
        builder.add_document(torch.arange(20), [20])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize(
    ("flags", "evaluations"),
    [("--split 100,0,0", 0), ("--split 1", 0), ("--split 90,10,0", 3), ("--split 80,10,10", 3), ("PER_SPLIT", 0)],
)
def test_a_run_without_other_data_trains_without_evaluations(
    flags: str, evaluations: int, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron would take batches from datasets that it has not built."""
    data = f"--train-data-path {corpus}" if flags == "PER_SPLIT" else f"--data-path {corpus} {flags}"
    words = f"{MODEL} {ROPE} {DEPTHS} {data} --eval-iters 3"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words.split(), *flags_without(CUDA)])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    args, _ = parse_checked_args(cpu.installed())
    assert args.eval_iters == evaluations
    assert ("training without evaluations, as with --eval-iters 0" in capsys.readouterr().out) == (evaluations == 0)


@pytest.mark.parametrize("flags", ["--split 90,0,10", "--split 0,0,1 --skip-train", f"--split 100,0,0 {FULL}"])
def test_evaluation_without_data_is_rejected(
    flags: str, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(f"{ROPE} {DEPTHS} --data-path {corpus} {flags} --eval-iters 1", monkeypatch, capsys)
    assert "which leaves nothing to validate on; give validation data, or --eval-iters 0." in said


@pytest.fixture
def checkpoint(megatron: None, tmp_path: Path) -> Path:
    """Create a checkpoint of a trunk with one sequential MTP layer, according to its metadata."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    names = ["decoder.final_layernorm.weight", "mtp.layers.0.eh_proj.weight", "mtp.layers.0.enorm.weight"]
    state = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(4)) for name in names}
    dist_checkpointing.save(state | {"args": Namespace()}, str(folder))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (DEPTHS, "has 1 MTP layer(s); give --mtp-init random or --mtp-init last-layer"),
        (DEPTHS, "missing ones, or give --mtp-use-repeated-layer for one layer that drafts every token."),
        (f"{DEPTHS} --mtp-init random --mtp-architecture parallel", "give --mtp-architecture sequential"),
    ],
)
def test_a_different_number_of_mtp_layers_needs_a_flag(
    flags: str, says: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(f"{ROPE} {MOCK} {flags} --load {checkpoint}", monkeypatch, capsys)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (DEPTHS, "has 1 MTP layer(s); give --mtp-init random or --mtp-init last-layer"),
        (f"{DEPTHS} --mtp-use-repeated-layer --mtp-architecture parallel", "drop one of the two"),
        ("--mtp-num-layers 1 --mtp-architecture parallel", "give --mtp-architecture sequential"),
    ],
)
def test_depths_of_the_older_format_are_counted(
    flags: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: --ckpt-format torch silently initialized them at random; two pipeline stages, the MTP layer on the
    last.
    """
    names = {"00_000": "decoder.layers.0.x", "00_001": "mtp.layers.0.eh_proj.weight"}
    for rank, name in names.items():
        file = tmp_path / "iter_0000001" / f"mp_rank_{rank}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save({"model": {name: torch.zeros(4)}, "iteration": 1}, file)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    words = f"{ROPE} {MOCK} {flags} --ckpt-format torch --load {tmp_path}"
    assert says in refusal(words, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("flags", "depths", "position"),
    [
        (f"{ROPE} --num-layers 2 --mtp-num-layers 0", None, "rope"),
        ("--position-embedding-type none --hybrid-layer-pattern *-*- --mtp-num-layers 0", None, "none"),
        (f"--num-layers 2 --use-rotary-position-embeddings {DEPTHS}", 2, "rope"),
    ],
)
def test_older_flags_mean_the_same_as_in_megatron(
    flags: str, depths: int | None, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{MODEL.replace('--num-layers 2', '')} {MOCK} {flags}"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words.split(), *flags_without(CUDA)])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    args, model = parse_checked_args(cpu.installed())
    assert (args.mtp_num_layers, model.transformer.mtp_num_layers) == (depths, depths)
    assert args.position_embedding_type == position


UNUSED = (
    "--mtp-use-repeated-layer --mtp-unroll 3 --mtp-repeated-layer-shares-kv --mtp-detach-heads --mtp-init last-layer "
    "--mtp-acceptance-interval 5 --mtp-hidden-state-mixing --mtp-lr 1e-3 --mtp-clip-grad 1 --mtp-loss mix "
    "--mtp-loss-mix ce=1,tv=1 --mtp-temperature 2 --mtp-lk-eta 2 --mtp-label-smoothing 0.1 --mtp-z-loss 0.1 "
    "--mtp-loss-weights 1,2 --mtp-loss-schedule step --mtp-loss-schedule-steps 3 --mtp-loss-final-factor 0.1 "
    "--mtp-token-fraction 0.5 --mtp-draft-vocab-size 9 --mtp-loss-scaling-factor 0.3"
)


def test_mtp_num_layers_0_switches_off_mtp_in_a_launch_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --mtp-num-layers 0 after a script's flags; each of these flags was rejected before."""
    words = f"{MODEL} {ROPE} {MOCK} {UNUSED} --mtp-linear-ce-main --mtp-num-layers 0"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words.split(), *flags_without(CUDA)])
    args, model = parse_checked_args(cpu.installed())
    assert args.mtp_num_layers is model.transformer.mtp_num_layers is None
    assert model.mtp == MTPConfig(mtp_linear_ce_main=True)
    assert not args.mtp_use_repeated_layer
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("> --mtp-num-layers is 0: "))
    assert "without --mtp-architecture" not in said
    assert set(said.split()) >= {word for word in UNUSED.split() if word.startswith("--")} - {
        "--mtp-loss-scaling-factor"
    }


def test_extra_mtp_layers_of_a_checkpoint_must_be_dropped_first(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reader, "stored_depths", lambda _: StoredDepths(3, True))
    sentence = refusal(f"{ROPE} {MOCK} {DEPTHS} --mtp-use-repeated-layer --load {checkpoint}", monkeypatch, capsys)
    assert "(--load) has 3 MTP layers, and the model is to have 1; give --mtp-num-layers 3 without" in sentence
    assert "drop-mtp --keep 1 writes." in sentence


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "which is empty; write a token id on every line"),
        ("3\nfour\n", "which is not a list of token ids, in text or of torch: invalid literal"),
        ("3\n4000\n", "which has the id 4000, and ids are 0 to"),
        ("3\n-1\n", "which has the id -1, and ids are 0 to"),
        ("3\n5\n3\n", "which has the id 3 twice; give every token once"),
    ],
)
def test_a_bad_list_of_draft_tokens_is_rejected(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids.txt").write_text(text)
    sentence = refusal(f"{ROPE} {MOCK} {DEPTHS} --mtp-draft-vocab-file {tmp_path}/ids.txt", monkeypatch, capsys)
    assert f"--mtp-draft-vocab-file is {tmp_path}/ids.txt" in sentence
    assert says in sentence


@pytest.fixture
def drafting_checkpoint(megatron: None, tmp_path: Path) -> Path:
    """Create one with two MTP layers that draft the tokens 2, 3 and 5, according to its metadata."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    names = [f"mtp.layers.{layer}.eh_proj.weight" for layer in (0, 1)]
    tensors = {name: torch.zeros(4) for name in names} | {"mtp.draft_vocabulary": torch.tensor([2, 3, 5])}
    state = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    dist_checkpointing.save(state | {"args": Namespace()}, str(folder))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "ids.txt").write_text("2\n3\n6\n")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--mtp-draft-vocab-size 4", "--mtp-draft-vocab-size is 4, but the MTP layers of"),
        ("--mtp-draft-vocab-file {folder}/ids.txt", "were trained to draft 3 other tokens; leave the flag out"),
    ],
)
def test_a_checkpoint_keeps_its_draft_vocabulary(
    flags: str,
    says: str,
    drafting_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = f"{ROPE} {MOCK} {DEPTHS} --load {drafting_checkpoint} {flags.format(folder=drafting_checkpoint)}"
    assert says in refusal(given, monkeypatch, capsys)


def test_every_rank_needs_a_token_to_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids.txt").write_text("0\n1\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = f"{ROPE} {MOCK} {DEPTHS} --tensor-model-parallel-size 2 --mtp-draft-vocab-file {tmp_path}/ids.txt"
    assert "of the 2 draft tokens none has an id from 128 to 255, the slice of one rank" in refusal(
        flags, monkeypatch, capsys
    )


def test_machine_flags_come_last_and_are_reported() -> None:
    argv = ["pretrain_gpt.py", "--transformer-impl", "transformer_engine"]
    note = set_machine_flags(argv, on_cpu=True)
    assert argv[3:] == flags_without(CUDA)
    assert note is not None
    assert note.startswith("no CUDA device")


@pytest.mark.parametrize(
    ("flags", "multiplies", "advises"), [("--bf16", False, True), ("--bf16", True, False), ("", False, False)]
)
def test_a_cpu_without_bfloat16_products_is_reported(
    flags: str, multiplies: bool, advises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "multiplies_bfloat16", lambda: multiplies)
    note = set_machine_flags(["pretrain_gpt.py", *flags.split()], on_cpu=True)
    assert note is not None
    assert ("without --bf16" in note) == advises


@pytest.mark.parametrize(
    ("has_te", "has_apex", "given", "added"),
    [
        (True, True, [], []),
        (True, False, [], []),
        (True, False, ["--transformer-impl", "local"], flags_without(APEX)),
        (True, False, ["--transformer-impl=local"], flags_without(APEX)),
        (True, False, ["--transformer-impl", "local", *flags_without(APEX)], []),
        (False, True, [], flags_without(TE)),
        (False, False, [], flags_without(TE)),
    ],
)
def test_a_gpu_gets_the_flags_for_the_kernels_that_are_missing(
    has_te: bool, has_apex: bool, given: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine fuses weight gradients without Apex; Megatron's own layers do not."""
    monkeypatch.setattr(arguments, "transformer_engine_works", lambda: has_te)
    monkeypatch.setattr(arguments, "fuses_weight_gradients", lambda: has_apex)
    argv = ["pretrain_gpt.py", *given]
    note = set_machine_flags(argv, on_cpu=False)
    assert argv == ["pretrain_gpt.py", *given, *added]
    assert (note is None) == (not added)


@pytest.mark.parametrize(
    ("flag", "shown", "hidden"),
    [
        (
            "--help",
            "--mtp-architecture --mtp-init --mtp-metrics-dir --verbose --help-megatron torchrun",
            "--moe-router",
        ),
        ("--help-megatron", "--mtp-architecture --moe-router-topk --verbose torchrun", ""),
    ],
)
def test_help_shows_our_flags_and_megatrons_when_asked_to(
    flag: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's own parser fails here on a percent sign in one of its help texts."""
    with contextlib.suppress(SystemExit):
        assert cli.main(["train", flag]) == 0
    text = capsys.readouterr().out
    assert [word for word in shown.split() if word not in text] == []
    assert [word for word in hidden.split() if word in text] == []


def test_our_alias_replaces_a_flag_of_a_newer_megatron() -> None:
    """Megatron 0.20 has a field `mtp_hsm`, whose flag is our --mtp-hsm; its own code reads the field."""
    parser = ArgumentParser()
    parser.add_argument_group("transformer").add_argument("--mtp-hsm", action="store_true")
    args = add_mtp_arguments(parser).parse_args(["--mtp-hsm"])
    assert (args.mtp_hidden_state_mixing, args.mtp_hsm) == (True, False)


@pytest.mark.parametrize(
    ("flags", "ranks", "says"),
    [
        (
            "--global-batch-size 4 --micro-batch-size 2",
            8,
            "--global-batch-size is 4, but --micro-batch-size 2 on 8 data-parallel ranks needs a multiple of 16;",
        ),
        (
            "--global-batch-size 4 --micro-batch-size 2 --eval-global-batch-size 16",
            8,
            "--global-batch-size is 4, but --micro-batch-size 2 on 8 data-parallel ranks needs a multiple of 16;",
        ),
        ("--global-batch-size 16 --eval-global-batch-size 3", 2, "(--eval-global-batch-size is 3, "),
        ("--tensor-model-parallel-size 3", 8, "8 ranks, not a multiple of --tensor-model-parallel-size 3 x --pipe"),
        ("--pipeline-model-parallel-size 4", 4, "--num-layers is 2, not a multiple of --pipeline-model-parallel-size"),
        ("--num-attention-heads 3", 1, "--hidden-size is 32, not a multiple of --num-attention-heads 3; give one"),
        ("--seq-length 32", 1, "--seq-length is 32, but --max-position-embeddings is 16; give as many"),
        ("--context-parallel-size 3", 3, "--seq-length is 16, not a multiple of twice --context-parallel-size 3;"),
        ("--num-experts 3 --expert-model-parallel-size 2", 2, "--num-experts is 3, not a multiple of --expert-model"),
        ("--min-lr 1", 1, "--min-lr is 1.0, above --lr 0.001; give at most that."),
        ("--fp16 --bf16", 1, "--fp16 and --bf16 were given; give one of the two."),
    ],
)
def test_megatrons_commonest_refusals_name_the_flags_that_were_typed(
    flags: str, ranks: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the first error named --eval-global-batch-size, which was not given."""
    for name, value in {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert says in refusal(f"{ROPE} {MOCK} {flags}", monkeypatch, capsys)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("--micro-batch-size 1", "--micro-batch-size is missing; give the sequences of a microbatch."),
        ("--num-layers 2", "--num-layers is missing; give the layers of the trunk."),
        ("--hidden-size 32", "--hidden-size is missing; give it."),
        ("--num-attention-heads 4", "--num-attention-heads is missing; give it."),
        ("--seq-length 16", "--seq-length is missing; give the tokens of a sequence."),
        ("--max-position-embeddings 16", "--max-position-embeddings is missing; give --seq-length or more."),
        ("--tokenizer-type NullTokenizer", "--tokenizer-type is missing; give it, such as HuggingFaceTokenizer with "),
        ("--vocab-size 99", "--vocab-size is missing; give the tokens of --tokenizer-type NullTokenizer."),
        ("--train-iters 1", "--train-iters is missing; give the steps of the run, or --train-samples."),
        ("--lr 1e-3", "--lr is missing; give the peak learning rate."),
        ("--eval-interval 1", "--eval-interval is missing; give the steps between evaluations."),
    ],
)
def test_a_missing_flag_is_named(
    missing: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{MODEL.replace(missing, '')} {ROPE} {MOCK}"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words.split()])
    with pytest.raises(SystemExit):
        main(sys.argv, on_cpu=True)
    assert capsys.readouterr().err.startswith(f"pretrain_gpt.py: error: {says}")


def test_all_missing_flags_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adding those of the --help example starts the run; a plan needs no data and no schedule."""
    monkeypatch.setattr(sys, "argv", ["train", *DEPTHS.split()])
    with pytest.raises(SystemExit):
        main(sys.argv, on_cpu=True)
    named = re.findall(r"--[a-z-]+", capsys.readouterr().err.partition(" are missing")[0])
    needed = [word for word in f"{MODEL} {ROPE}".split() if word.startswith("--")]
    assert {*named} == {*needed, "--data-path"} - {"--vocab-size"}
    monkeypatch.setattr(sys, "argv", ["train", *DEPTHS.split()])
    with pytest.raises(ValueError, match=r"^--num-layers, .*, --micro-batch-size are missing; give them"):
        parse_run_args(plans=True)


def test_an_older_checkpoint_names_its_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"args": Namespace(tensor_model_parallel_size=2), "model": {}}, file)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    sentence = refusal(f"{ROPE} {MOCK} {DEPTHS} --ckpt-format torch --load {tmp_path}", monkeypatch, capsys)
    assert "saved with --tensor-model-parallel-size 2, and this run has 1; give 2, and save with" in sentence


def test_the_first_example_of_the_help_names_all_that_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it failed before the first step, because --eval-interval was missing."""
    first = EXAMPLES.partition("megatron-mtp train ")[2].partition("\n\n")[0].replace("\\\n", " ")
    words = first.partition("--data-path")[0] + f"{MOCK} --tokenizer-type NullTokenizer --vocab-size 99"
    monkeypatch.setattr(sys, "argv", ["train", *words.split(), *flags_without(CUDA)])
    args, _ = parse_checked_args(cpu.installed())
    assert args.eval_interval is not None
    assert set(first.split()) >= {"--data-path", "--tokenizer-type", "--tokenizer-model", "--mtp-num-layers"}
