"""Launch lines of models trained with Megatron-LM get MTP layers by one more flag, and otherwise keep their meaning."""

import itertools
import re
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import pytest
import torch
from forgotten_flags import forget
from launch_lines import LINES, Line
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parse_and_validate_args
from packaging.version import Version
from tiers import tiered

from megatron_mtp.decoding import load
from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.parser import TE, flags_without
from megatron_mtp.training.arguments import parse_checked_args
from megatron_mtp.training.checks import check_precision
from megatron_mtp.training.flags import add_mtp_arguments

KERNELS = [
    "models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb",
    "transformer.moe.moe_utils.fused_permute",
    "transformer.moe.moe_utils.fused_permute_with_probs",
    "transformer.moe.moe_utils.fused_sort_chunks_by_index",
    "transformer.moe.moe_utils.fused_sort_chunks_by_index_with_probs",
    "transformer.moe.moe_utils.fused_unpermute",
]
"""Transformer Engine features that configurations request."""


@pytest.fixture(autouse=True)
def _machine_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an H100 with Transformer Engine, as far as argument validation needs it."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("megatron_mtp.megatron.cpu.installed", lambda: False)
    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.9.0"))
    for kernel in KERNELS:
        monkeypatch.setattr(f"megatron.core.{kernel}", object())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def launch(line: Line, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Become the first process of this launch line."""
    text = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {line.vocabulary}"
    depths = f"--mtp-num-layers {line.depths}"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split(), *text.split(), *depths.split()])
    monkeypatch.setenv("WORLD_SIZE", str(line.gpus))
    monkeypatch.setenv("RANK", "0")


def differences(ours: Namespace, megatrons: Namespace) -> list[str]:
    """Return names of arguments with different values, excluding our own.

    If a data loader creates no mask, it counts as causal, since attention without a mask is causal.
    """
    own = vars(add_mtp_arguments(ArgumentParser()).parse_args([]))
    shared = (
        vars(ours).keys() - own.keys() - {"reads_chats", "drafter_beside_mtp", "create_attention_mask_in_dataloader"}
    )
    return [name for name in shared if repr(vars(ours)[name]) != repr(vars(megatrons).get(name))]


def test_there_are_twenty_lines_and_more() -> None:
    assert len(LINES) - sum(line.refused is not None for line in LINES.values()) >= 20


@pytest.mark.parametrize("name", tiered(LINES, list(LINES)[::3]))
def test_a_line_with_mtp_layers_means_the_same_as_in_megatron(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = LINES[name]
    launch(line, line.mended, monkeypatch)
    args, model = parse_checked_args(cpu.installed())
    assert (args.mtp_num_layers, model.transformer.mtp_num_layers) == (line.depths, line.depths)
    forget()
    launch(line, f"{line.mended} {line.for_megatron}", monkeypatch)
    assert differences(args, parse_and_validate_args()) == []


WITHOUT_TE = "Transformer Engine|transformer-engine|install TE|without a CUDA device"


@pytest.mark.parametrize("name", tiered(LINES, list(LINES)[1::3]))
def test_without_transformer_engine_a_launch_line_trains_or_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the flags added on such a machine; a fusion that the line itself requests is rejected."""
    line = LINES[name]
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    launch(line, f"{line.mended} {' '.join(flags_without(TE))}", monkeypatch)
    try:
        args, model = parse_checked_args(cpu.installed())
        check_precision(args)
    except ValueError as error:
        assert re.search(WITHOUT_TE, str(error)), error  # noqa: PT017
    else:
        assert model.transformer.transformer_impl == "local"


def settings(config: TransformerConfig) -> dict[str, Any]:
    """Return what a model computes, from its sizes and its router settings."""
    names = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels mtp_num_layers "
    names += "num_moe_experts moe_router_topk moe_router_score_function moe_layer_freq multi_latent_attention "
    names += "normalization qk_layernorm activation_func window_size softmax_type"
    return {name: getattr(config, name) for name in names.split()}


@pytest.mark.parametrize("name", tiered(LINES, list(LINES)[::3]))
def test_a_checkpoint_of_a_launch_line_drafts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank and two, with and without Transformer Engine, whatever the run's layout, fusions and precision."""
    line = LINES[name]
    launch(line, line.mended, monkeypatch)
    args, model = parse_checked_args(cpu.installed())
    monkeypatch.undo()  # a machine without Transformer Engine
    for ranks, has_te in itertools.product((1, 2), (False, True)):
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)  # noqa: B023
        monkeypatch.setattr(load.parallel_state, "get_expert_model_parallel_world_size", lambda: 1)
        monkeypatch.setattr(load, "transformer_engine_works", lambda: has_te)  # noqa: B023
        if ranks == 2 and args.num_experts and args.add_bias_linear:
            with pytest.raises(ValueError, match="has experts with biases"):
                load.drafting_config(args, torch.bfloat16, "it")
            continue
        config = load.drafting_config(args, torch.bfloat16, "it").transformer
        assert settings(config) == settings(model.transformer)
        assert (config.transformer_impl == "transformer_engine") == (has_te and ranks == 2)
        assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (ranks, 1)
        assert (config.fp8, config.params_dtype) == (None, torch.bfloat16)
        assert config.moe_input_jitter_eps is config.moe_expert_capacity_factor is None  # they would change outputs


REFUSED = {name: line for name, line in LINES.items() if line.refused is not None}


@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED.keys())
def test_a_launch_line_that_mtp_cannot_train_with_is_rejected(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line.refused is not None
    launch(line, line.flags, monkeypatch)
    with pytest.raises((ValueError, AssertionError), match=line.refused.says):  # ours or Megatron's
        parse_checked_args(cpu.installed())
