"""Memory of stages against Megatron's own estimate, and of the chunked loss against an H200."""

from argparse import Namespace
from dataclasses import asdict, replace

import pytest
from lines import line_of, words_of
from megatron.training.theoretical_memory_usage import compute_activation_memory, compute_weight_and_optimizer_memory

from megatron_mtp.extensions.plan.hardware import CARDS
from megatron_mtp.extensions.plan.launch import Line, experts_by_layer, read
from megatron_mtp.extensions.plan.memory import States, chunked_bytes, loss_bytes, memory_of
from megatron_mtp.extensions.plan.placement import even
from megatron_mtp.extensions.plan.planning import pipeline_of, plan, with_depths
from megatron_mtp.extensions.plan.sizes import model_of

MIB = 2**20


def megatrons(line: Line, gpus: int) -> Namespace:
    """Return the arguments that Megatron's estimate reads."""
    layers = line.whole("num_layers")
    hidden, heads = line.whole("hidden_size"), line.whole("num_attention_heads")
    freq = [int(one) for one in experts_by_layer(line.moe_layer_freq, layers)] if line.num_experts else 1
    made = Namespace(**asdict(line), padded_vocab_size=line.vocabulary, moe_latent_size=None, world_size=gpus)
    made.add_bias_linear, made.data_parallel_size = not line.disable_bias_linear, line.data_parallel(gpus)
    made.virtual_pipeline_model_parallel_size = line.chunks if line.chunks > 1 else None
    made.moe_ffn_hidden_size = line.moe_ffn_hidden_size or line.ffn_hidden_size
    made.moe_layer_freq, made.expert_tensor_parallel_size = freq, line.expert_tensor
    made.kv_channels, made.ffn_hidden_size = line.kv_channels or hidden // heads, line.ffn_hidden_size or 4 * hidden
    return made


@pytest.mark.parametrize(
    ("name", "gpus", "within"),
    [("gpt3-175b", 1024, 0.01), ("llama2-70b", 256, 0.01), ("mixtral-8x22b", 128, 0.01), ("qwen3-30b-a3b", 32, 0.01)],
)
def test_state_memory_matches_megatrons_estimate(name: str, gpus: int, within: float) -> None:
    """Without MTP layers, whose eh_proj it omits."""
    line = replace(with_depths(line_of(name), 0), context_parallel_size=1, optimizer_cpu_offload=False)
    model = model_of(line)
    placement = even(len(model.layers), 0, line.pipeline_model_parallel_size, line.chunks)
    first = memory_of(model, placement, pipeline_of(line, gpus), gpus)[0].parts
    ours = first["weights and gradients"] + first["optimizer"]
    their = compute_weight_and_optimizer_memory(megatrons(_in_full(line), gpus))
    assert ours == pytest.approx(their, rel=within)


def _in_full(line: Line) -> Line:
    """Return the line without 16-bit moments and gradients, which Megatron's estimate does not support."""
    assert not line.grad_reduce_in_bf16
    assert line.exp_avg_dtype == "fp32"
    return line


def test_activation_memory_matches_megatrons_estimate() -> None:
    """Its layer is ungated with dropout; it counts the first pipeline stage."""
    line = line_of("gpt3-175b", "--sequence-parallel --recompute-granularity selective")
    line = replace(with_depths(line, 0), fp16=False, bf16=True)
    model, gpus = model_of(line), 1024
    placement = even(96, 0, 16, 1)
    ours = memory_of(model, placement, pipeline_of(line, gpus), gpus)[0].parts["activations"]
    their = compute_activation_memory(megatrons(line, gpus), pipeline_of(line, gpus).microbatches)
    assert ours == pytest.approx(their, rel=0.01)


H200 = (
    "--hidden-size 2048 --bf16 --num-layers 1 --num-attention-heads 16 --vocab-size 131072 --seq-length 16384".split()
)


def test_chunked_loss_memory_matches_h200_measurements() -> None:
    """docs/explanation/evidence_gpu.md: 16,384 x 131,072 logits, 1,664 MiB in chunks, 24,580 MiB for all."""
    line = read(H200)
    assert chunked_bytes(16384, 131072, line) / MIB == pytest.approx(1664, rel=0.05)
    logits = 16384 * 131072
    assert (2 + 4 + 4 + 2) * logits / MIB == pytest.approx(24580, rel=0.01)  # torch's gradient is the last 2 bytes
    assert loss_bytes(model_of(line), 0) / MIB == (2 + 4) * logits / MIB


def test_few_tokens_keep_the_gradients_of_their_logits() -> None:
    line = read(H200)
    assert chunked_bytes(1024, 131072, line) == 1024 * 2048 * 2 + 1024 * 131072 * 2
    assert chunked_bytes(0, 131072, line) == 0


def test_bytes_of_a_parameter() -> None:
    plain = States(read([*H200, "--use-distributed-optimizer"]), 8)
    assert (plain.held(100, 0), plain.optimizer(100, 0)) == (600, 150)
    halves = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --grad-reduce-in-bf16"
    short = States(read([*H200, *halves.split()]), 8)
    assert (short.held(100, 0), short.optimizer(100, 0)) == (400, 800)
    assert States(read(H200[:2]), 1).held(1, 0) + States(read(H200[:2]), 1).optimizer(1, 0) == 16


def test_mtp_layers_add_their_state_and_an_embedding_copy() -> None:
    """Stage 6 of DeepSeek-V3 with its MTP layer: what the dry run counts as depths and as a copy."""
    made = plan(words_of("deepseek-v3-h100", "--transformer-impl local"), CARDS["H100"], 1024)
    alone = next(one for one in made.of(1) if one.name == "stage of their own")
    held = alone.memory[6].parts
    copy, depths, data, expert_data = 463_339_520, 344_986_624, 64, 2
    assert held["embedding copies"] == pytest.approx(copy * (6 + 8 / data))
    experts = 256 * 3 * 2048 * 7168 / 64
    state = 6 * depths + 8 * ((depths - experts) / data + experts / expert_data)
    assert held["MTP layers"] == pytest.approx(state, rel=1e-6)
    assert alone.memory[7].parts["embedding copies"] == 0


def test_frozen_trunks_need_no_gradients() -> None:
    words = [*words_of("llama2-7b"), "--mtp-train-only"]
    frozen, trained = (plan(one, CARDS["H100"], 16).of(1)[0] for one in (words, words[:-1]))
    assert frozen.memory[0].parts["weights and gradients"] == trained.memory[0].parts["weights and gradients"] / 3
    assert frozen.memory[0].parts["optimizer"] == 0
    assert frozen.time.seconds < trained.time.seconds / 2
