"""What a run that cannot start prints: one sentence with the flags' values; a log file has the traceback."""

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_mtp.losses.objective import scaling_factor
from megatron_mtp.megatron.refusals import DIVERGED
from megatron_mtp.training.quiet import quiet
from megatron_mtp.training.short_log import keep_listing
from megatron_mtp.training.startup import explained

pytestmark = pytest.mark.usefixtures("megatron")

ARGS = Namespace(
    save="runs/x",
    rerun_mode="disabled",
    hidden_size=33,
    num_attention_heads=4,
    lr=0.1,
    adam_eps=-1.0,
    seed=1234,
    mmap_bin_files=True,
    group_query_attention=True,
)


def train_step(args: Namespace, work: Callable[[], Any]) -> None:
    """Stand in for a Megatron function, with its name and arguments."""
    work()


def save_checkpoint(args: Namespace, work: Callable[[], Any]) -> None:
    work()


def validate_result(args: Namespace, work: Callable[[], Any]) -> None:
    raise RuntimeError("Rank 0: Unexpected result nan")


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def said(work: Callable[[], Any], capfd: pytest.CaptureFixture[str], has_started: bool = False) -> str:
    """Return the message that the process ends with."""
    with pytest.raises(SystemExit) as end, explained("pretrain_gpt.py", lambda: has_started):
        work()
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("pretrain_gpt.py: error: ")
    return line.removeprefix("pretrain_gpt.py: error: ")


def log_of(sentence: str) -> str:
    return Path(sentence.rpartition("the traceback is in ")[2].removesuffix(".")).read_text(encoding="utf-8")


def test_an_assertion_without_a_message_shows_its_condition_and_the_flags_in_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a separate file, since pytest rewrites assertions in tests."""
    source = tmp_path / "asserts.py"
    source.write_text(
        "def validate_args(args):\n    assert (\n        args.hidden_size % args.num_attention_heads == args.seed)\n"
    )
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    sentence = said(lambda: names["validate_args"](ARGS), capfd)
    assert sentence.startswith(
        "Megatron refuses these flags: ( args.hidden_size % args.num_attention_heads == args.seed) does not hold "
        "(--hidden-size is 33, --num-attention-heads is 4); the traceback is in "
    )
    assert "AssertionError" in log_of(sentence)


def test_a_flag_that_is_missing_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its value is None, which the message mentions."""
    source = tmp_path / "divides.py"
    source.write_text("def validate_args(args):\n    return args.hidden_size // args.log_interval + args.seed\n")
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    args = Namespace(**vars(ARGS), log_interval=None)
    assert "(--hidden-size is 33, --log-interval is None)" in said(lambda: names["validate_args"](args), capfd)


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (
            AssertionError("hidden_size must be\n even."),
            "the first step fails: hidden_size must be even (--hidden-size is 33); ",
        ),
        (ValueError("give --num-attention-heads too"), "the first step fails: give --num-attention-heads too (--num-a"),
        (KeyError("x"), "the first step fails: KeyError 'x'; "),
        (ValueError("no_mmap_bin_files"), "the first step fails: ValueError no_mmap_bin_files; "),
        (ValueError("mmap_bin_files, use_mcore"), "the first step fails: ValueError mmap_bin_files, use_mcore; "),
        (
            ValueError("swiglu_it or group_query_attention"),
            "the first step fails: swiglu_it or group_query_attention (--group-query-attention is given); ",
        ),
        (ValueError("Invalid epsilon value: -1.0"), "the first step fails: Invalid epsilon value: -1.0 (--adam-eps is"),
        (ValueError("found std -1, not 33"), "the first step fails: found std -1, not 33 (--adam-eps is -1.0); "),
        (RuntimeError(""), "the first step fails: RuntimeError; "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "this machine has not enough memory (Default"),
        (FileNotFoundError(2, "No such file", "x.bin"), "'x.bin' cannot be used (No such file); correct the path"),
    ],
)
def test_errors_before_the_second_step_are_explained(
    error: Exception, begins: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sentence = said(lambda: train_step(ARGS, raising(error)), capfd)
    assert sentence.startswith(begins)
    assert f"{type(error).__name__}" in log_of(sentence)


def test_a_bug_of_ours_keeps_its_traceback_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    sentence = said(lambda: scaling_factor(ARGS, None, 0), capfd)  # type: ignore[arg-type]
    assert sentence.startswith("the run cannot start: ")
    assert "in scaling_factor" in log_of(sentence)


def test_the_traceback_goes_to_the_log_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), quiet():  # noqa: PT012
        print("arguments")
        keep_listing(tmp_path)
        with explained("train"):
            train_step(ARGS, raising(RuntimeError("a shape")))
    assert f"the traceback is in {tmp_path}/megatron.log.\n" in capfd.readouterr().err
    assert re.match(
        "arguments\nTraceback .*RuntimeError: a shape\n$", (tmp_path / "megatron.log").read_text(), re.DOTALL
    )


def test_an_exit_without_a_status_is_reported_as_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    for status in (None, 1):
        with quiet():
            print("ERROR: could not find the checkpoint")
            sentence = said(raising(SystemExit(status)), capfd)
            assert sentence.startswith("Megatron ends here: ERROR: could not find the checkpoint; its log is ")
    for work, has_started in ((raising(SystemExit(0)), False), (raising(SystemExit()), True)):
        with pytest.raises(SystemExit) as end, explained("train", [lambda: False, lambda: True][has_started]):
            work()
        assert not end.value.code


def test_a_checkpoint_that_cannot_be_saved(capfd: pytest.CaptureFixture[str]) -> None:
    failed = CheckpointException("write", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})  # type: ignore[dict-item]
    sentence = said(lambda: save_checkpoint(ARGS, raising(failed)), capfd, has_started=True)
    assert sentence.startswith("no checkpoint can be saved to --save runs/x: unexpected pos 704 vs 598; ")
    assert "MiB are free there" in sentence
    full = OSError(28, "full", "x")
    assert "no space is left" in said(lambda: save_checkpoint(ARGS, raising(full)), capfd, has_started=True)


def test_errors_of_a_run_that_has_started_stay_errors() -> None:
    for error in (RuntimeError("a shape"), ValueError("x"), AssertionError("y")):
        with pytest.raises(type(error)), explained("train", lambda: True):
            train_step(ARGS, raising(error))


def test_a_nan_loss_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    assert said(lambda: validate_result(ARGS, raising(SystemExit())), capfd, has_started=True) == DIVERGED
    without_save = Namespace(**vars(ARGS) | {"save": None})
    assert said(lambda: save_checkpoint(without_save, raising(TypeError("no path"))), capfd) == DIVERGED
    reruns = Namespace(**vars(ARGS) | {"rerun_mode": "validate_results"})
    with pytest.raises(RuntimeError, match="Unexpected"), explained("train", lambda: True):
        validate_result(reruns, print)


def test_our_own_refusals_are_whole_sentences(capfd: pytest.CaptureFixture[str]) -> None:
    from megatron_mtp.training.config_file import flags_of

    sentence = said(lambda: flags_of(Path("nowhere.yaml"), None), capfd)  # type: ignore[arg-type]
    assert sentence.startswith("--config is nowhere.yaml, which cannot be read as YAML")
    assert "traceback" not in sentence


def test_ctrl_c_exits_with_status_130_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, explained("train"):
        raise KeyboardInterrupt
    assert (end.value.code, capfd.readouterr().err) == (130, "train: interrupted\n")


def test_missing_or_mismatched_optimizer_state_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    args = Namespace(**vars(ARGS) | {"load": "runs/y"})
    absent = said(lambda: train_step(args, raising(KeyError("optimizer"))), capfd)
    assert absent.startswith("--load runs/y has no optimizer state, or that of another optimizer; give --no-load-optim")
    assert absent.endswith("or --finetune to start anew with its weights.")
    moved = said(lambda: train_step(args, raising(RuntimeError("(TP, PP) mismatch after resume ((1, 1) vs"))), capfd)
    assert "or --no-load-optim; a run that saves with --dist-ckpt-optim-fully-reshardable goes on in any" in moved
