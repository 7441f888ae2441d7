"""Every recipe of scripts/slurm: the command that its job would start passes argument validation."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from cluster import RECIPES, Cluster

from megatron_mtp.checkpoint.families.trained import epsilon_note
from megatron_mtp.megatron import cpu
from megatron_mtp.training.arguments import parse_checked_args, set_machine_flags

GPUS = {"moe_16b": 32, "nemotron_h_8b": 16, "qwen3_8b": 16, "smollm2_135m": 8, "tiny": 2}
VOCABULARY = {"moe_16b": 163840, "nemotron_h_8b": 131072, "qwen3_8b": 151936, "smollm2_135m": 49152, "tiny": 127}
PARAMETERS = {
    "moe_16b": 15_960_110_208,
    "nemotron_h_8b": 8_100_852_736,
    "qwen3_8b": 8_190_735_360,
    "smollm2_135m": 134_515_008,
    "tiny": 98_496,
}
"""Parameters of the trunks. Qwen3-8B and SmolLM2-135M have as many tensor elements in their safetensors files."""


def parsed(recipe: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Return arguments of a run's first rank on the recipe's GPUs, with a vocabulary but without data."""
    data = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY[recipe]}".split()
    if "--data-path" in flags:
        at = flags.index("--data-path")
        del flags[at : at + 2]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags, *data])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))  # the expert kernels query it
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(GPUS[recipe])}.items():
        monkeypatch.setenv(name, value)
    set_machine_flags(sys.argv, on_cpu=True)
    args, _ = parse_checked_args(cpu.installed())
    return args


def parameters(args: Namespace, vocabulary: int) -> int:
    """Return the trunk's parameters, computed from its sizes."""
    hidden, layers = args.hidden_size, args.num_layers
    tables = 2 if args.untie_embeddings_and_output_weights else 1
    if args.hybrid_layer_pattern is not None:
        trunk = args.hybrid_layer_pattern.split("/")[0]
        widths = {"M": mamba(args), "-": 2 * hidden * args.ffn_hidden_size, "*": attention(args)}
        return sum(widths[layer] + hidden for layer in trunk) + hidden + tables * vocabulary * hidden
    dense = 3 * hidden * args.ffn_hidden_size
    if args.num_experts is None:
        widths = layers * dense
    else:
        all_experts = args.num_experts * args.moe_ffn_hidden_size + args.moe_shared_expert_intermediate_size
        experts = 3 * hidden * all_experts + args.num_experts * (hidden + 1)
        widths = sum(experts if has_experts else dense for has_experts in args.moe_layer_freq)
    return layers * (attention(args) + 2 * hidden) + widths + hidden + tables * vocabulary * hidden


def mamba(args: Namespace) -> int:
    """Return parameters of one Mamba-2 layer: projections, convolution of four positions, dt, A, D, and a norm."""
    heads = args.mamba_num_heads
    inner, shared = heads * args.mamba_head_dim, 2 * args.mamba_num_groups * args.mamba_state_dim
    return args.hidden_size * (3 * inner + shared + heads) + 5 * (inner + shared) + 3 * heads + inner


def attention(args: Namespace) -> int:
    """Return parameters of one attention layer."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not args.multi_latent_attention:
        groups = args.num_query_groups if args.group_query_attention else heads
        return 2 * hidden * args.kv_channels * (heads + groups) + 2 * args.kv_channels * args.qk_layernorm
    rank, content, position, value = args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim
    down = hidden * heads * (content + position) + hidden * (rank + position) + rank
    return down + rank * heads * (content + value) + heads * value * hidden


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_builds_the_model_that_it_names(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path)
    done = cluster.submit("pretrain", recipe)
    assert done.returncode == 0, done.stderr
    words = cluster.given()
    flags = words[words.index(str(cluster.run / "jobs/123456/code/pretrain_gpt.py")) + 1 :]
    args = parsed(recipe, flags, monkeypatch)
    assert parameters(args, VOCABULARY[recipe]) == PARAMETERS[recipe]
    assert epsilon_note(args) == {}  # about latent attention: transformers computes the exported model
    assert args.exit_signal_handler
    assert args.save == args.load == str(cluster.run / "checkpoint")
