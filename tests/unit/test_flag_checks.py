"""The tables of checks name flags that Megatron has, and its refusals become sentences."""

from argparse import ArgumentParser
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import training
from megatron.training.arguments import add_megatron_arguments
from torch.distributed.checkpoint import CheckpointException

from megatron_mtp.errors import InputError
from megatron_mtp.training import flag_checks, refusals
from megatron_mtp.training.flag_checks import RANGES, check_tokenizer_folder, flag
from megatron_mtp.training.forward_step import refusal_of_diverged
from megatron_mtp.training.refusals import DIVERGED, megatrons_refusals, refusals_of_a_run


def test_every_flag_of_the_ranges_is_one_of_megatrons() -> None:
    """A name that is misspelt would be checked never."""
    known = {action.dest: action.option_strings for action in add_megatron_arguments(ArgumentParser())._actions}
    names = [name for allowed in RANGES for name in allowed.flags.split()]
    assert len(names) == len(set(names))
    assert {name: flag(name) for name in names if flag(name) not in known.get(name, [])} == {}


def refused(error: BaseException) -> str:
    with pytest.raises(ValueError, match="Megatron refuses these flags") as end, megatrons_refusals():
        raise error
    return str(end.value).removeprefix("Megatron refuses these flags: ")


def test_megatrons_refusals_are_sentences() -> None:
    assert refused(AssertionError("a must be\n b.")) == "a must be b."
    assert refused(KeyError("x")) == "KeyError 'x'."


def test_an_assertion_without_a_message_names_its_condition(tmp_path: Path) -> None:
    """In a file of its own, since pytest gives those of tests a message."""
    source = tmp_path / "asserts.py"
    source.write_text("def check(width, heads):\n    assert (\n        width % heads == 0\n    )\n")
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    with (
        pytest.raises(ValueError, match=r"these flags: \( width % heads == 0 \) does not hold\."),
        megatrons_refusals(),
    ):
        names["check"](33, 4)


def test_an_exit_without_a_word_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="its last line above says why"), megatrons_refusals():
        raise SystemExit
    with pytest.raises(SystemExit), megatrons_refusals():
        raise SystemExit(0)


@pytest.fixture
def run_args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    args = SimpleNamespace(save="runs/x", rerun_mode="disabled")
    monkeypatch.setattr(refusals, "get_args", lambda: args)
    return args


def in_a_run(name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function of Megatron's loop raise, where runs are refused."""

    @wraps(getattr(training, name))  # the probes of patches/table.py look at its name and signature
    def raising(*_: Any) -> None:
        raise error

    monkeypatch.setattr(training, name, raising)
    with refusals_of_a_run():
        getattr(training, name)()


def test_what_stops_a_run_names_its_flag(run_args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = CheckpointException("write", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"to --save runs/x: unexpected pos 704 vs 598\. \d+\.\d MiB are free there"):
        in_a_run("save_checkpoint", failed, monkeypatch)
    with pytest.raises(InputError, match=r"the data sets cannot be built: no blend\."):
        in_a_run("build_train_valid_test_data_iterators", Exception("no blend"), monkeypatch)
    with pytest.raises(OSError, match="full"):  # which is said as everywhere
        in_a_run("save_checkpoint", OSError(28, "full"), monkeypatch)


def test_bugs_of_a_run_stay_bugs(run_args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a shape"):
        in_a_run("setup_model_and_optimizer", RuntimeError("a shape"), monkeypatch)
    monkeypatch.setattr(refusals, "_is_ours", lambda _: True)
    with pytest.raises(TypeError, match="ours"):
        in_a_run("setup_model_and_optimizer", TypeError("ours"), monkeypatch)


def test_a_run_that_diverged_without_save(run_args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    run_args.save = None
    with pytest.raises(InputError, match="NaN or infinite"):
        in_a_run("save_checkpoint", AssertionError("not called"), monkeypatch)
    with pytest.raises(InputError) as end, refusal_of_diverged(run_args):  # type: ignore[arg-type]
        raise RuntimeError("Rank 0: Unexpected result nan")
    assert str(end.value) == DIVERGED
    run_args.rerun_mode = "validate_results"
    with pytest.raises(RuntimeError, match="Should not be here"), refusal_of_diverged(run_args):  # type: ignore[arg-type]
        raise RuntimeError("Should not be here")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a/b/c", "no folder; give the one"),
        ("/nowhere", "no folder; give the one"),
        ("nobody/has-it", "cannot be reached"),
    ],
)
def test_a_tokenizer_that_nobody_can_look_up(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would try for most of a minute, and print what it tried."""
    monkeypatch.setattr(flag_checks, "_is_reachable", lambda _: False)
    with pytest.raises(ValueError, match=said):
        check_tokenizer_folder(SimpleNamespace(tokenizer_model=name, tokenizer_type="HuggingFaceTokenizer"))  # type: ignore[arg-type]
    check_tokenizer_folder(SimpleNamespace(tokenizer_model=name, tokenizer_type="NullTokenizer"))  # type: ignore[arg-type]


def test_faults_are_injected_with_a_package_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(
        recompute_modules=None, moe_grouped_gemm=False, fault_injector_num_ranks=0, fp8=None, fp4=None
    )
    args.cuda_graph_impl, args.optimizer_cuda_graph = "none", False
    monkeypatch.setattr(flag_checks, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="--fault-injector-num-ranks needs the package nvidia-resiliency-ext"):
        flag_checks.check_machine(args)


def test_a_rank_of_less_than_0_is_refused() -> None:
    with pytest.raises(ValueError, match="--local-rank is -1; give 0 or more"):
        flag_checks.check_ranges(SimpleNamespace(local_rank=-1))
