"""The tables of checks name flags that Megatron has."""

from argparse import ArgumentParser
from types import SimpleNamespace

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_mtp.training import flag_checks
from megatron_mtp.training.flag_checks import RANGES, check_tokenizer_folder, flag


def test_every_flag_of_the_ranges_is_one_of_megatrons() -> None:
    """A name that is misspelt would be checked never."""
    known = {action.dest: action.option_strings for action in add_megatron_arguments(ArgumentParser())._actions}
    names = [name for allowed in RANGES for name in allowed.flags.split()]
    assert len(names) == len(set(names))
    assert {name: flag(name) for name in names if flag(name) not in known.get(name, [])} == {}


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
