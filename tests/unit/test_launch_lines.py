"""Launch lines of models that are trained with Megatron-LM take depths by one flag more, and keep their meaning."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

import pytest
from launch_lines import LINES, Line
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args
from megatron.training.global_vars import unset_global_variables
from packaging.version import Version
from tiers import tiered

from megatron_mtp.training.arguments import parse_checked_args
from megatron_mtp.training.dry_run import OF_LIBRARIES, without_libraries
from megatron_mtp.training.flags import add_mtp_arguments

KERNELS = [
    "models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb",
    "transformer.moe.moe_utils.fused_permute",
    "transformer.moe.moe_utils.fused_permute_with_probs",
    "transformer.moe.moe_utils.fused_sort_chunks_by_index",
    "transformer.moe.moe_utils.fused_sort_chunks_by_index_with_probs",
    "transformer.moe.moe_utils.fused_unpermute",
]
"""Transformer Engine's, which configurations ask for."""


@pytest.fixture(autouse=True)
def _no_globals_left() -> Iterator[None]:
    yield
    forget()


@pytest.fixture(autouse=True)
def _machine_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as arguments are validated, an H100 with Transformer Engine."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.9.0"))
    for kernel in KERNELS:
        monkeypatch.setattr(f"megatron.core.{kernel}", object())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def forget() -> None:
    """Megatron's global arguments, tokenizer and batch sizes."""
    unset_global_variables()
    unset_num_microbatches_calculator()


def launch(line: Line, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the first process of this line."""
    text = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {line.vocabulary}"
    depths = f"--mtp-num-layers {line.depths}"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split(), *text.split(), *depths.split()])
    monkeypatch.setenv("WORLD_SIZE", str(line.gpus))
    monkeypatch.setenv("RANK", "0")


def differences(ours: Namespace, megatrons: Namespace) -> list[str]:
    """Names of arguments that the two have with different values, ours apart."""
    own = vars(add_mtp_arguments(ArgumentParser()).parse_args([]))
    shared = vars(ours).keys() - own.keys()
    return [name for name in shared if repr(vars(ours)[name]) != repr(vars(megatrons).get(name))]


def test_there_are_twenty_lines_and_more() -> None:
    assert len(LINES) - sum(line.refused is not None for line in LINES.values()) >= 20


@pytest.mark.parametrize("name", tiered(LINES, list(LINES)[::3]))
def test_a_line_means_with_depths_what_megatron_makes_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = LINES[name]
    launch(line, line.mended, monkeypatch)
    args, model = parse_checked_args()
    assert (args.mtp_num_layers, model.transformer.mtp_num_layers) == (line.depths, line.depths)
    forget()
    launch(line, f"{line.mended} {line.for_megatron}", monkeypatch)
    assert differences(args, parse_and_validate_args()) == []


REFUSED = {name: line for name, line in LINES.items() if line.refused is not None}


@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED.keys())
def test_a_line_that_depths_cannot_train_with_is_refused(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line.refused is not None
    launch(line, line.flags, monkeypatch)
    with pytest.raises(ValueError, match=line.refused.says):
        parse_checked_args()


def test_a_plan_needs_no_library_of_gpus() -> None:
    """--dry-run ended with what the machine lacks; the flags are Megatron's, so that none is misspelt."""
    names = {action.dest for action in add_megatron_arguments(ArgumentParser())._actions}
    assert names >= OF_LIBRARIES.keys() - {"fp4"} | {"moe_token_dispatcher_type", "moe_flex_dispatcher_backend"}
    plain = {name: value for name, (_, value) in OF_LIBRARIES.items()}
    backend = {"moe_flex_dispatcher_backend": "deepep"}
    args = Namespace(**plain, moe_token_dispatcher_type="flex", **backend)
    args.fp8, args.moe_permute_fusion = "e4m3", True
    assert without_libraries(args)[0] == "planned as for a machine with Transformer Engine and DeepEP"
    assert vars(args) == plain | {"moe_token_dispatcher_type": "alltoall"} | backend
    assert without_libraries(args) == []
