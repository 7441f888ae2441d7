"""Shrinks the model of a launch line to a tiny one that keeps everything the MTP loss depends on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, FFN, HEADS, GROUPS, CHANNELS = 4, 32, 48, 4, 2, 8
EXPERTS, EXPERT_FFN, MOST_ROUTED, MOST_DEPTHS = 4, 24, 2, 3
VOCAB, POSITIONS = 96, 24
SYMBOLS, MOST_KINDS = "M*-E", 4
"""Layers of hybrids that can be shrunk (Mamba-2, attention, MLP, experts), and the most kinds in a tiny model."""

MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 8}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}

PRECISION = re.compile(r"--(fp16|fp8|fp4|first-last-layers-bf16|attention-softmax-in-fp32|te-precision)\b")

REFUSED = {
    "--experimental-attention-variant": "its layers need kernels that run on a GPU alone",
    "--heterogeneous-layers-config-path": "its layers differ from each other",
    "--heterogeneous-layers-config-encoded-json": "its layers differ from each other",
    "--spec": "the layers are of a module of yours",
}
"""Flags of models that cannot be shrunk, with the reason."""

LEFT_OUT = {
    "--window-size": "attention to all tokens instead",
    "--softmax-type": "attention without sinks instead",
    "--attention-output-gate": "attention without a gate instead",
    "--use-rope-scaling": "plain rotary positions instead",
    "--rotary-seq-len-interpolation-factor": "plain rotary positions instead",
    "--moe-router-num-groups": "experts of all groups compete instead",
    "--moe-router-group-topk": "experts of all groups compete instead",
    "--moe-latent-size": "experts without a latent instead",
    "--moe-expert-capacity-factor": "no token is dropped instead",
    "--moe-token-dispatcher-type": "allgather instead",
    "--moe-router-load-balancing-type": "no auxiliary loss instead",
    "--moe-aux-loss-coeff": "no auxiliary loss instead",
    "--qk-l2-norm": "attention without this norm instead",
    "--use-mup": "plain scales instead",
    "--hidden-dropout": "0 instead",
    "--attention-dropout": "0 instead",
    "--num-virtual-stages-per-pipeline-rank": "a chunk per pipeline rank instead",
    "--num-layers-per-virtual-pipeline-stage": "a chunk per pipeline rank instead",
}
"""Flags that the tiny model drops, with its substitute; the MTP loss does not depend on them."""

READ = """
    --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention --num-query-groups
    --kv-channels --seq-length --max-position-embeddings --vocab-size --swiglu --squared-relu --quick-geglu
    --normalization --apply-layernorm-1p --norm-epsilon --layernorm-epsilon --disable-bias-linear --add-qkv-bias
    --qk-layernorm --position-embedding-type --rotary-base --rotary-percent --rotary-interleaved
    --untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim
    --qk-pos-emb-head-dim --v-head-dim --rope-type --num-experts --moe-router-topk --moe-ffn-hidden-size
    --moe-shared-expert-intermediate-size --moe-router-score-function --moe-router-pre-softmax
    --moe-router-topk-scaling-factor --moe-router-enable-expert-bias --moe-layer-freq --mtp-num-layers
    --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads --calculate-per-token-loss
    --recompute-activations --recompute-granularity --recompute-method --recompute-num-layers --recompute-modules
    --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size --expert-model-parallel-size
    --hybrid-layer-pattern --hybrid-override-pattern --is-hybrid-model --mamba-state-dim --mamba-head-dim
    --mamba-num-groups --mamba-num-heads --sequence-parallel --pipeline-model-parallel-layout --micro-batch-size
    --global-batch-size --bf16
""".split()


@dataclass(frozen=True)
class Tiny:
    """A tiny model, with the layout of its launch line.

    Attributes:
        config: fields of Megatron's TransformerConfig, as plain values; `activation` is a name.
        model: arguments of GPTModel: vocab, positions, tied, position_embedding, rotary_base, rotary_percent; for a
            HybridModel also its pattern.
        sizes: tensor, pipeline, context and expert parallel sizes of the launch line.
        sequence_parallel: whether the launch line uses sequence parallelism.
        own_stage: whether the MTP layers have a pipeline stage of their own.
        recompute: fields of TransformerConfig for activation recomputation; empty without it.
        changed: differences to the launch line's model, as phrases.
        left_out: dropped flags, with the tiny model's substitute.
        unread: flags that do not affect the loss.
        in_bf16: whether the run uses BF16; it is then tested in addition to float32.
        attached: whether MTP layers are attached by this package instead of Megatron's own.
    """

    config: dict[str, Any]
    model: dict[str, Any]
    sizes: dict[str, int]
    sequence_parallel: bool = False
    own_stage: bool = False
    recompute: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    in_bf16: bool = False
    attached: bool = False

    @property
    def depths(self) -> int:
        """Number of MTP depths."""
        return int(self.config["mtp_num_layers"])

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is a hybrid."""
        return "pattern" in self.model


def words_of(file: Path) -> list[str]:
    """Return the flags of a YAML file, a mapping of names (with or without leading hyphens) to values.

    Raises:
        ValueError: the file cannot be read, it has no such mapping, or PyYAML is missing.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError("--config needs PyYAML; install it, or give the flags after --.") from error
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {file} cannot be read ({' '.join(str(error).split())[:120]}).") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"--config {file} holds no mapping of flags to values; give lines such as 'hidden_size: 4096'."
        )
    words = list[str]()
    for name, value in values.items():
        flag = f"--{str(name).lstrip('-').replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words


def read(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse a launch line into values by flag, with hyphens. Later flags win, as with argparse.

    Raises:
        ValueError: there is a word before the first flag.
    """
    if words and not words[0].startswith("--"):
        raise ValueError(f"the launch flags begin with '{words[0]:.40}', which is not a flag; give them behind --.")
    return dict(_flags(words))


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    flag, values = "", list[str]()
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            if flag:
                yield flag, values
            flag, equals, value = word.partition("=")
            flag, values = flag.replace("_", "-"), [value] if equals else []
        else:
            values.append(word)
    if flag:
        yield flag, values


class _Line:
    """Reads values of flags by type."""

    def __init__(self, flags: Mapping[str, list[str]]) -> None:
        self.flags = flags

    def has(self, flag: str) -> bool:
        return flag in self.flags

    def text(self, flag: str, default: str) -> str:
        if flag not in self.flags:
            return default
        if not self.flags[flag]:
            raise ValueError(f"{flag} has no value; give one.")
        return self.flags[flag][0]

    def whole(self, flag: str, default: int, least: int = 1) -> int:
        text = self.text(flag, str(default))
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise ValueError(f"{flag} is '{text:.40}'; give a whole number from {least}.")
        return int(text)

    def number(self, flag: str, default: float) -> float:
        text = self.text(flag, str(default))
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{flag} is '{text:.40}'; give a number.") from None

    def choice(self, flag: str, default: str, *allowed: str) -> str:
        text = self.text(flag, default)
        if text not in allowed:
            raise ValueError(f"{flag} is '{text:.40}', which prove cannot shrink; it knows {', '.join(allowed)}.")
        return text


def shrink(words: Sequence[str], keeps_sizes: bool = False) -> Tiny:
    """Build the tiny model of a launch line.

    Args:
        keeps_sizes: whether to keep the sizes of the line, for a step saved by the user's own loop.

    Raises:
        ValueError: a value is wrong, there are no MTP layers, or this kind of model cannot be shrunk.
    """
    flags = read(words)
    line = _Line(flags)
    for flag, why in REFUSED.items():
        if flag in flags:
            raise ValueError(f"a model with {flag} cannot be shrunk: {why}; prove judges GPT models and hybrids.")
    pattern = line.text("--hybrid-layer-pattern", line.text("--hybrid-override-pattern", ""))
    depths = line.whole("--mtp-num-layers", pattern.count("/"), least=0)
    if not depths:
        raise ValueError("the launch flags have no MTP layers; give --mtp-num-layers.")
    changed = list[str]()

    def sized(flag: str, tiny: int) -> int:
        if flag in flags and (given := line.whole(flag, tiny)) != tiny:
            if keeps_sizes:
                return given
            changed.append(f"{flag} {tiny} for {given}")
        return tiny

    config: dict[str, Any] = {
        "num_layers": sized("--num-layers", LAYERS),
        "hidden_size": sized("--hidden-size", HIDDEN),
        "ffn_hidden_size": sized("--ffn-hidden-size", FFN),
        "num_attention_heads": sized("--num-attention-heads", HEADS),
        "kv_channels": sized("--kv-channels", CHANNELS),
        "mtp_num_layers": sized("--mtp-num-layers", min(depths, MOST_DEPTHS)),
        "mtp_loss_scaling_factor": line.number("--mtp-loss-scaling-factor", 0.1),
        "mtp_use_repeated_layer": line.has("--mtp-use-repeated-layer"),
        "mtp_detach_heads": line.has("--mtp-detach-heads"),
        "calculate_per_token_loss": line.has("--calculate-per-token-loss"),
        "normalization": line.choice("--normalization", "LayerNorm", "LayerNorm", "RMSNorm"),
        "layernorm_zero_centered_gamma": line.has("--apply-layernorm-1p"),
        "layernorm_epsilon": line.number("--norm-epsilon", line.number("--layernorm-epsilon", 1e-5)),
        "add_bias_linear": not line.has("--disable-bias-linear"),
        "add_qkv_bias": line.has("--add-qkv-bias"),
        "qk_layernorm": line.has("--qk-layernorm"),
        "rotary_interleaved": line.has("--rotary-interleaved"),
        "gated_linear_unit": line.has("--swiglu") or line.has("--quick-geglu"),
        "activation": _activation(line),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": True,
    }
    heads = line.whole("--num-attention-heads", HEADS)
    grouped = line.has("--group-query-attention") and line.whole("--num-query-groups", 1) < heads
    config["num_query_groups"] = sized("--num-query-groups", GROUPS) if grouped else config["num_attention_heads"]
    if line.has("--multi-latent-attention"):
        config |= _latent(line, sized)
    if line.has("--num-experts"):
        config |= _experts(line, sized)
    position = line.choice("--position-embedding-type", "learned_absolute", "learned_absolute", "rope", "yarn", "none")
    if position == "yarn":
        position = "rope"
        changed.append("--position-embedding-type rope for yarn")
    if config.get("multi_latent_attention") and line.text("--rope-type", "yarn") == "yarn":
        changed.append("--rope-type rope for yarn")
    model = {
        "vocab": sized("--vocab-size", VOCAB),
        "positions": POSITIONS,
        "tied": not line.has("--untie-embeddings-and-output-weights"),
        "position_embedding": position,
        "rotary_base": int(line.number("--rotary-base", 10000)),
        "rotary_percent": line.number("--rotary-percent", 1.0),
    }
    if pattern:
        model["pattern"] = _pattern(pattern, config["mtp_num_layers"])
        changed.append(f"--hybrid-layer-pattern {model['pattern']} for {pattern}")
        config |= {name: sized(f"--{name.replace('_', '-')}", tiny) for name, tiny in MAMBA.items()}
    for flag in ("--seq-length", "--max-position-embeddings"):
        sized(flag, POSITIONS)
    left_out = {flag: "float32 instead" for flag in flags if PRECISION.match(flag)}
    left_out |= {flag: LEFT_OUT[flag] for flag in flags if flag in LEFT_OUT}
    left_out |= {flag: "without it" for flag in flags if flag.startswith("--mtp-") and flag not in READ}
    layout = line.text("--pipeline-model-parallel-layout", "")
    return Tiny(
        config=config,
        model=model,
        sizes={
            name: line.whole(f"--{name}-{'' if name == 'context' else 'model-'}parallel-size", 1)
            for name in ("tensor", "pipeline", "context", "expert")
        },
        sequence_parallel=line.has("--sequence-parallel"),
        own_stage=any("m" in stage and "t" not in stage for stage in layout.replace("*", "").split("|")),
        recompute=_recompute(line),
        changed=tuple(changed),
        left_out=left_out,
        in_bf16=line.has("--bf16"),
        unread=tuple(flag for flag in flags if flag not in READ and flag not in left_out),
    )


def _pattern(given: str, depths: int) -> str:
    """Return a pattern of four layers with the kinds of the trunk, in their order, and the MTP layers.

    Raises:
        ValueError: a kind of layer has no substitute, or the pattern has no MTP layers.
    """
    trunk, *of_depths = given.replace("|", "").split("/")
    if unknown := sorted({*"".join((trunk, *of_depths))} - {*SYMBOLS}):
        raise ValueError(f"a hybrid with layers {' '.join(unknown)} cannot be shrunk; prove knows {' '.join(SYMBOLS)}.")
    if not trunk or not of_depths or not of_depths[0]:
        raise ValueError(f"--hybrid-layer-pattern {given:.40} has no MTP layers; give them behind /, as in M*-/*-.")
    kinds = "".join(dict.fromkeys(trunk))
    return "/".join([(kinds * MOST_KINDS)[:LAYERS], *[of_depths[0]] * depths])


def _activation(line: _Line) -> str:
    names = {"--swiglu": "silu", "--quick-geglu": "quick_gelu", "--squared-relu": "squared_relu"}
    return next((name for flag, name in names.items() if line.has(flag)), "gelu")


def _latent(line: _Line, sized: Any) -> dict[str, Any]:
    """Return the fields of multi-latent attention."""
    config: dict[str, Any] = {"multi_latent_attention": True, "rope_type": "rope"}
    config["rotary_base"] = line.number("--rotary-base", 10000)
    for name, tiny in LATENT.items():
        config[name] = sized(f"--{name.replace('_', '-')}", tiny)
    if not line.has("--q-lora-rank"):
        config["q_lora_rank"] = None
    return config


def _experts(line: _Line, sized: Any) -> dict[str, Any]:
    """Return the fields of a mixture of experts, without auxiliary loss, which eq. 21-25 do not include."""
    routed = min(line.whole("--moe-router-topk", 2), MOST_ROUTED)
    dense = not line.text("--moe-layer-freq", "1").replace(" ", "").strip("([").startswith("1")
    config: dict[str, Any] = {
        "num_moe_experts": sized("--num-experts", EXPERTS),
        "moe_router_topk": sized("--moe-router-topk", routed),
        "moe_ffn_hidden_size": sized("--moe-ffn-hidden-size", EXPERT_FFN),
        "moe_layer_freq": [0, 1, 1, 1] if dense else [1, 1, 1, 1],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_score_function": line.choice("--moe-router-score-function", "softmax", "softmax", "sigmoid"),
        "moe_router_pre_softmax": line.has("--moe-router-pre-softmax") or routed == 1,
        "moe_router_enable_expert_bias": line.has("--moe-router-enable-expert-bias"),
        "moe_grouped_gemm": False,
    }
    if line.has("--moe-router-topk-scaling-factor"):
        config["moe_router_topk_scaling_factor"] = line.number("--moe-router-topk-scaling-factor", 1.0)
    if line.has("--moe-shared-expert-intermediate-size"):
        config["moe_shared_expert_intermediate_size"] = sized("--moe-shared-expert-intermediate-size", EXPERT_FFN)
    return config


def _recompute(line: _Line) -> dict[str, Any]:
    """Return the fields for activation recomputation."""
    if not line.has("--recompute-activations") and not line.has("--recompute-granularity"):
        return {}
    kind = line.choice("--recompute-granularity", "selective", "selective", "full")
    if kind == "full":
        method = line.choice("--recompute-method", "uniform", "uniform", "block")
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}
    modules = line.flags.get("--recompute-modules") or ["core_attn"]
    return {"recompute_granularity": "selective", "recompute_modules": modules}
