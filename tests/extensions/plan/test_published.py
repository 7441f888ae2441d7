"""Published runs with and without MTP layers, compared with their plans; docs/extensions/plan.md has the sources."""

import pytest

from megatron_mtp.extensions.plan.decoding import PUBLISHED, Accepted, DraftDecoder
from megatron_mtp.extensions.plan.hardware import CARDS, card_of
from megatron_mtp.extensions.plan.launch import read
from megatron_mtp.extensions.plan.planning import NAIVE, plan
from megatron_mtp.extensions.plan.sizes import model_of
from megatron_mtp.extensions.plan.step_time import Clock

MARIN = """
    --num-layers 13 --hidden-size 1280 --num-attention-heads 10 --group-query-attention --num-query-groups 2
    --kv-channels 128 --seq-length 4096 --vocab-size 128256 --num-experts 256 --moe-router-topk 4
    --moe-ffn-hidden-size 640 --moe-shared-expert-intermediate-size 1280 --ffn-hidden-size 640 --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0
    --attention-dropout 0 --bf16 --expert-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 256
    --mtp-num-layers 1 --mtp-linear-ce-main --use-distributed-optimizer""".split()
"""The shape of marin-community/marin#5772; widths are from experiments/grug/moe/heuristic.py at 2e8ced2."""
MARIN_TOKENS, MARIN_SPEED, MARIN_SPEED_WITH_DEPTH = 256 * 4096, 502_522, 400_417

QWEN_27B = """
    --hidden-size 5120 --num-attention-heads 24 --group-query-attention --num-query-groups 4 --kv-channels 256
    --ffn-hidden-size 17408 --swiglu --normalization RMSNorm --disable-bias-linear --attention-output-gate
    --untie-embeddings-and-output-weights --seq-length 1024 --vocab-size 248320 --hidden-dropout 0
    --attention-dropout 0 --linear-num-key-heads 16 --linear-num-value-heads 48 --bf16 --micro-batch-size 1
    --global-batch-size 16 --use-distributed-optimizer --mtp-linear-ce-main --hybrid-layer-pattern""".split()
QWEN_27B = [*QWEN_27B, 16 * "G-G-G-*-" + "/*-"]
"""Qwen3.5-27B as in ByteDance-Seed/VeOmni#1088: 64 layers, three of four with linear attention."""
NPU = "bf16=313,memory=64,bandwidth=1600,link=196,network=25"
"""An assumption: the pull request does not name its NPUs."""


def speed_lost(words: list[str], card: str, gpus: int, seconds: float) -> float:
    """Return tokens per second with an MTP layer relative to without, minus 1."""
    made = plan(words, card_of(card), gpus, 1, seconds)
    none, one = (made.of(depths, NAIVE)[0].time.seconds for depths in (0, 1))
    assert none == pytest.approx(seconds)
    return none / one - 1


def test_marins_depth_on_8_h100() -> None:
    """-20.3 % tokens/s, from the step time without MTP layers, and from nothing."""
    published = MARIN_SPEED_WITH_DEPTH / MARIN_SPEED - 1
    assert published == pytest.approx(-0.203, abs=5e-4)
    assert speed_lost(MARIN, "H100", 8, MARIN_TOKENS / MARIN_SPEED) == pytest.approx(published, abs=0.05)
    assert 1 / (1 + plan(MARIN, CARDS["H100"], 8).overhead(1)) - 1 == pytest.approx(published, abs=0.05)


def test_qwens_27_b_on_16_npus() -> None:
    """+1.47 to +1.82 % of a step: communicating its weights takes most of the time of 1,024 tokens per rank."""
    added = 1 / (1 + speed_lost(QWEN_27B, NPU, 16, 7.2)) - 1
    assert added == pytest.approx(0.0165, abs=0.05)


def test_head_time_matches_h200_measurements() -> None:
    """docs/explanation/evidence_gpu.md: `ce` of 16,384 x 131,072 logits, head and gradients: 54.58 ms; `kd` 72.98."""
    words = "--hidden-size 2048 --bf16 --num-layers 1 --num-attention-heads 16 --vocab-size 131072 --seq-length 16384"
    for loss, milliseconds in (("ce", 54.58), ("kd", 72.98)):
        clock = Clock(model_of(read([*words.split(), "--mtp-loss", loss])), CARDS["H200"], 1)
        own = clock.losses(1).total - clock.losses(0).total
        assert 1000 * own == pytest.approx(milliseconds, rel=0.05)


def test_a_loss_schedule_costs_the_weighted_mean_of_its_parts() -> None:
    words = "--hidden-size 64 --num-layers 1 --num-attention-heads 4 --vocab-size 1024 --seq-length 64".split()

    def seconds(loss: str) -> float:
        return Clock(model_of(read([*words, "--mtp-loss", loss])), CARDS["H200"], 1).losses(1).total

    assert seconds("ce") < seconds("kd") < seconds("lk")
    assert seconds("ce:0.25,lk:0.75") == pytest.approx(0.25 * seconds("ce") + 0.75 * seconds("lk"), rel=1e-12)


H200_DRAFTING = """--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --swiglu
    --vocab-size 32768 --seq-length 512 --bf16 --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --mtp-num-layers 4""".split()


def test_drafting_on_an_h200() -> None:
    """docs/explanation/evidence_gpu.md: 606.4 tokens/s with CUDA graphs, times 1.638, 2.273, 2.764, 3.181."""
    decoder = DraftDecoder(model_of(read(H200_DRAFTING)), CARDS["H200"], 1, context=256, forward=1 / 606.4)
    lengths = [1.991, 2.987, 3.965, 4.923]
    rates = Accepted(
        tuple(b - a for a, b in zip([1.0, *lengths], lengths, strict=False)), "docs/explanation/evidence_gpu.md"
    )
    for count, speed in enumerate([1.638, 2.273, 2.764, 3.181], start=1):
        assert decoder.speed_up(rates, count) == pytest.approx(speed, rel=0.2)


DEEPSEEK = "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu"
DEEPSEEK += " --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --num-experts 256 --moe-router-topk 8"
DEEPSEEK += " --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048"
DEEPSEEK += " --vocab-size 129280 --seq-length 4096 --untie-embeddings-and-output-weights --mtp-num-layers 1"


@pytest.mark.parametrize(
    ("gpu", "weight", "milliseconds", "count", "published"),
    [
        pytest.param("H200", 1.0, 55.47, 1, 1.63, id="vllm-project/vllm#12755, TPOT of 55.47 ms"),
        pytest.param("H200", 1.0, 1000 * 1.76 / 77, 1, 1.76, id="sgl-project/sglang#3582, 77 token/s at 1.76 x"),
        pytest.param("B200", 0.5, 1000 * 2.16 / 253, 3, 2.16, id="TensorRT-LLM, 253 token/s at 2.16 x"),
    ],
)
def test_deepseek_r1_drafts(gpu: str, weight: float, milliseconds: float, count: int, published: float) -> None:
    """One sequence on 8 GPUs, from the measured forward pass without drafts; within a quarter."""
    decoder = DraftDecoder(model_of(read(DEEPSEEK.split())), CARDS[gpu], 8, weight, 2048, milliseconds / 1000)
    assert decoder.speed_up(PUBLISHED["deepseek"], count) == pytest.approx(published, rel=0.25)


GLM = "--num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64 --swiglu"
GLM += " --multi-latent-attention --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192 --v-head-dim 256"
GLM += " --num-experts 256 --moe-router-topk 8 --moe-layer-freq [0]*3+[1]*75 --moe-ffn-hidden-size 2048"
GLM += " --moe-shared-expert-intermediate-size 2048 --vocab-size 154880 --seq-length 4096"
GLM += " --untie-embeddings-and-output-weights --mtp-num-layers 1"


def test_glm_5_2_drafts_on_one_machine() -> None:
    """jundot/omlx#2113: 15.3 tokens/s on an M3 Ultra with 4-bit weights; 1.24 times as many with a draft, 1.31 for
    code.
    """
    machine = card_of("bf16=28,memory=512,bandwidth=819,link=1,network=1")
    decoder = DraftDecoder(model_of(read(GLM.split())), machine, 1, 0.5, 512, 1 / 15.3)
    assert 1.24 * 0.8 < decoder.speed_up(PUBLISHED["glm"], 1) < 1.31 * 1.2


def test_accepted_lengths_of_glm_5_2() -> None:
    """SemiAnalysisAI/InferenceX#2570: 2.99 tokens with 3 drafts and 3.61 with 5; the rates are llama.cpp's for 3."""
    assert PUBLISHED["glm"].length(3) == pytest.approx(2.99, abs=0.02)
    assert PUBLISHED["glm"].length(5) == pytest.approx(3.61, abs=0.05)
