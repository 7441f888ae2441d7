"""gpt-oss: attention sinks, windows in every second layer, experts with biases whose gate and up stand in turn."""

from megatron_mtp.checkpoint.families.blocks import GQA, Place
from megatron_mtp.checkpoint.families.decoder import Decoder, trunk_family
from megatron_mtp.checkpoint.families.dense import windows_by_type
from megatron_mtp.checkpoint.families.family import Layout
from megatron_mtp.checkpoint.families.flags import UntrainableError, pairs, softmax_router_flags
from megatron_mtp.checkpoint.families.rules import HFTensor, InTurn, Map, Piece, Rule, Same, Then, Transposed, rename
from megatron_mtp.checkpoint.families.trunk import gqa, layers, moe
from megatron_mtp.checkpoint.hf.config import HFConfig

ALPHA = 1.702
"""Factor inside of the sigmoid of Megatron's quick GELU."""


class _GptOss(Decoder):
    """A decoder whose experts all have biases."""

    def mlp_or_experts(self, config: HFConfig, layout: Layout, place: Place, sparse: bool) -> list[Rule]:
        """Rules of a router and its experts; all layers are sparse."""
        experts, hidden = config.integer("num_local_experts"), config.integer("hidden_size")
        hf, mcore, width = f"{place.hf}mlp.", f"{place.mcore}mlp.", config.integer("intermediate_size")
        fc1, fc2 = f"{mcore}experts.experts.linear_fc1.", f"{mcore}experts.experts.linear_fc2."
        up, down = f"{hf}experts.gate_up_proj", f"{hf}experts.down_proj"
        in_turn = InTurn(1)
        return [
            rename(f"{hf}router.weight", f"{mcore}router.weight", (experts, hidden)),
            rename(f"{hf}router.bias", f"{mcore}router.bias", (experts,)),
            _moved(up, (experts, hidden, 2 * width), f"{fc1}weight", Then((Transposed(), in_turn))),
            _moved(f"{up}_bias", (experts, 2 * width), f"{fc1}bias", in_turn),
            _moved(down, (experts, width, hidden), f"{fc2}weight", Transposed()),
            _moved(f"{down}_bias", (experts, hidden), f"{fc2}bias", Same()),
        ]


def _moved(name: str, shape: tuple[int, ...], key: str, how: Map) -> Rule:
    ours = (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape
    return Rule((HFTensor(name, shape),), (Piece(key, ours),), how)


def _attention(config: HFConfig) -> GQA:
    bias = config.flag("attention_bias")
    return gqa(config, bias=bias, out_bias=bias)


def _windows(config: HFConfig) -> list[bool]:
    """A window in every second layer from the first on, unless the config says otherwise."""
    windows = windows_by_type(config, [index % 2 == 0 for index in range(layers(config))])
    return windows if config.has("sliding_window") else [False] * len(windows)


def _activation(config: HFConfig) -> list[str]:
    """(up + 1) gate sigmoid(1.702 gate), with gate and up limited."""
    if config.number("swiglu_alpha") != ALPHA:
        raise UntrainableError(f"'swiglu_alpha' {config.number('swiglu_alpha')}, where Megatron has {ALPHA}")
    limit = {"activation-func-clamp-value": config.number("swiglu_limit")}
    return ["--quick-geglu", *pairs({"glu-linear-offset": 1.0, **limit})]


def _refused(config: HFConfig) -> str | None:
    return None if config.flag("attention_bias") else "experts with biases beside an attention without"


GPT_OSS = trunk_family(
    "GPT-OSS",
    "gpt-oss 20B, 120B",
    ("gpt_oss",),
    _GptOss(
        _attention,
        mlp_bias="attention_bias",
        activation=_activation,
        sinks=True,
        windows=_windows,
        experts=moe,
        expert_flags=lambda config: softmax_router_flags(config, normed=True),
        refused=_refused,
    ),
    {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_alpha": ALPHA,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
    },
)
