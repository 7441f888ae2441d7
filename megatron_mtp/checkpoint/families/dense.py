"""Dense decoders, one row per transformers class. MTP layers can be attached if the class has none."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_mtp.checkpoint.families.blocks import fused_mlp_rules, plain_mlp_rules
from megatron_mtp.checkpoint.families.decoder import (
    CENTRED_LAYER_NORM,
    LAYER_NORM,
    Decoder,
    Multipliers,
    family_of_decoder,
    mlp_bias_refused,
)
from megatron_mtp.checkpoint.families.family import Depths, Family
from megatron_mtp.checkpoint.families.flags import squared_relu_flags
from megatron_mtp.checkpoint.families.trained import TrainedForm, dense_keys, is_dense_trunk
from megatron_mtp.checkpoint.families.trunk import (
    ORIGINAL_WEIGHTS,
    all_windows,
    biased,
    gqa,
    layers,
    llama_attention,
    qwen3_attention,
    windows_by_type,
)
from megatron_mtp.checkpoint.hf.config import ConfigError, HFConfig


def _dense_form(models: str, architecture: str, fits: Callable[[Namespace], bool]) -> TrainedForm:
    """Return the form of a dense model without MTP layers, if `fits` also holds for Megatron's arguments."""
    return TrainedForm(
        models=f"dense without MTP layers{models}",
        engines=("transformers", "vLLM", "SGLang"),
        architecture=architecture,
        keys=dense_keys,
        fits=lambda args, depths: is_dense_trunk(args, depths) and fits(args),
    )


def _mimo_keys(args: Namespace) -> dict[str, Any]:
    if args.num_experts or args.qk_layernorm or args.rotary_percent != 1.0:
        raise ValueError("--family mimo needs a dense model without --qk-layernorm and --rotary-percent.")
    return {"attention_bias": True, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}


MIMO_CONFIG = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""transformers has no class of this `model_type`, so engines read the config through this one."""


_ministral_windows = partial(windows_by_type, lambda index: True)
_three_windows = partial(windows_by_type, lambda index: bool(index % 4))
"""Three windows after each full attention, unless the config has other types."""


def _unplaced(config: HFConfig) -> list[bool]:
    """Return layers without positions: SmolLM3 has every fourth, unless `no_rope_layers` has a 1 or 0 for each.

    Raises:
        ValueError: `no_rope_layers` is something else.
    """
    count, placed = layers(config), config.keys.get("no_rope_layers")
    if placed is None:
        interval = config.integer("no_rope_layer_interval", default=4)
        return [(index + 1) % interval == 0 for index in range(count)]
    if not isinstance(placed, list) or len(placed) < count or any(one not in (0, 1) for one in placed):
        raise ConfigError(f"{config.source}: 'no_rope_layers' must be a list of {count} times 1 or 0, one a layer.")
    return [not one for one in placed[:count]]


def _stablelm_refused(config: HFConfig) -> str | None:
    if config.flag("qk_layernorm"):
        return "a norm for each head of queries and keys"
    return "attention and MLP side by side ('use_parallel_residual')" if config.flag("use_parallel_residual") else None


def _multipliers(config: HFConfig) -> Multipliers:
    return Multipliers(
        embedding=config.number("embedding_multiplier"),
        logits=1 / config.number("logits_scaling"),
        residual=config.number("residual_multiplier"),
        scores=config.number("attention_multiplier"),
    )


def _bases(config: HFConfig) -> list[Any]:
    """Return the rotary base of every layer, 0 for a layer without positions; empty without the key.

    Raises:
        ValueError: `layer_rope_theta` is not a list of a number for each layer.
    """
    bases, count = config.keys.get("layer_rope_theta"), layers(config)
    if bases is None:
        return []
    if not isinstance(bases, list) or len(bases) < count or not all(isinstance(one, int | float) for one in bases):
        raise ConfigError(f"{config.source}: 'layer_rope_theta' must be a list of {count} numbers, one a layer.")
    return bases[:count]


def _granite_unplaced(config: HFConfig) -> list[bool]:
    return [not base for base in _bases(config)]


def _granite_refused(config: HFConfig) -> str | None:
    differ = {base for base in _bases(config) if base} - {config.rope.get("rope_theta")}
    return "rotary bases that differ from layer to layer" if differ else None


_qwen2_attention = partial(gqa, bias=True)
_LLAMA = Decoder(llama_attention)
_PLAIN = Decoder(gqa)
_GLM = Decoder(biased, mlp=fused_mlp_rules, mlp_bias=None, refused=mlp_bias_refused, partial=True, interleaved=True)
_MIMO = Decoder(
    biased,
    zero_bias=True,
    mlp_bias=None,
    refused=mlp_bias_refused,
    depths=Depths(
        r"^model\.mtp_layers\.(\d+)\.input_proj\.weight$",
        "model.mtp_layers.{k}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        embedding_first=False,
        served={"": "model.layers.{n}."},
    ),
)
GRANITE = replace(_LLAMA, multipliers=_multipliers)
FACTORED = {ORIGINAL_WEIGHTS: r"\.o_proj\.weight$"}
"""Form of Granite's checkpoints, whose projections contain a factor."""

DENSE: tuple[Family, ...] = (
    family_of_decoder(
        "MiMo-7B",
        "MiMo-7B",
        ("mimo",),
        _MIMO,
        trained=TrainedForm(
            models="dense with MTP layers, `--family mimo`",
            engines=("vLLM", "SGLang"),
            architecture="MiMoForCausalLM",
            keys=_mimo_keys,
            fits=lambda args, depths: False,
            files={"configuration_mimo.py": MIMO_CONFIG},
        ),
        config_class="qwen2",
        defaults={"attention_bias": True},
    ),
    family_of_decoder(
        "Llama",
        "Llama 2 and 3, SmolLM2",
        ("llama",),
        replace(_LLAMA, refused=mlp_bias_refused),
        trained=_dense_form("", "LlamaForCausalLM", lambda args: not (args.qk_layernorm or args.add_qkv_bias)),
    ),
    family_of_decoder(
        "Qwen2",
        "Qwen2, Qwen2.5",
        ("qwen2",),
        Decoder(_qwen2_attention),
        trained=_dense_form(
            ", `--add-qkv-bias`", "Qwen2ForCausalLM", lambda args: bool(args.add_qkv_bias and not args.qk_layernorm)
        ),
    ),
    family_of_decoder(
        "Qwen3",
        "Qwen3, dense",
        ("qwen3",),
        Decoder(qwen3_attention, refused=mlp_bias_refused),
        trained=_dense_form(", `--qk-layernorm`", "Qwen3ForCausalLM", lambda args: bool(args.qk_layernorm)),
    ),
    family_of_decoder("Mistral", "Mistral 7B, Nemo, Small", ("mistral",), replace(_PLAIN, windows=all_windows)),
    family_of_decoder("Ministral", "Ministral 8B", ("ministral",), replace(_PLAIN, windows=_ministral_windows)),
    family_of_decoder("SmolLM3", "SmolLM3", ("smollm3",), replace(_LLAMA, unplaced=_unplaced)),
    family_of_decoder("Seed-OSS", "Seed-OSS", ("seed_oss",), Decoder(partial(biased, out="attention_out_bias"))),
    family_of_decoder(
        "Jais 2",
        "Jais 2",
        ("jais2",),
        Decoder(
            partial(biased, out="attention_bias"), mlp=plain_mlp_rules, activation=squared_relu_flags, norms=LAYER_NORM
        ),
    ),
    family_of_decoder(
        "Phi-3",
        "Phi-3, Phi-4, Phi-4-mini",
        ("phi3",),
        Decoder(
            lambda config: gqa(config, fused=True, query_key_value="qkv_proj"),
            mlp=fused_mlp_rules,
            mlp_bias=None,
            refused=mlp_bias_refused,
            partial=True,
            windows=all_windows,
        ),
    ),
    family_of_decoder("GLM-4, first form", "GLM-4-9B", ("glm",), _GLM, defaults={"partial_rotary_factor": 0.5}),
    family_of_decoder("Helium", "Helium", ("helium",), Decoder(biased, interleaved=True)),
    family_of_decoder(
        "ERNIE-4.5",
        "ERNIE-4.5, dense",
        ("ernie4_5",),
        Decoder(partial(biased, key="use_bias", out="use_bias"), mlp_bias="use_bias", interleaved=True),
    ),
    family_of_decoder(
        "CWM",
        "Code World Model",
        ("cwm",),
        replace(_PLAIN, windows=_three_windows),
        defaults={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    family_of_decoder(
        "InternLM3",
        "InternLM3",
        ("internlm3",),
        Decoder(partial(biased, key="qkv_bias", out="qkv_bias"), mlp_bias="bias"),
    ),
    family_of_decoder("IQuest-Coder", "IQuest-Coder V1", ("iquestcoder",), _LLAMA),
    family_of_decoder(
        "Arcee", "AFM-4.5B", ("arcee",), replace(_LLAMA, mlp=plain_mlp_rules, activation=squared_relu_flags)
    ),
    family_of_decoder(
        "Nemotron",
        "Nemotron-4, Minitron",
        ("nemotron",),
        replace(_LLAMA, mlp=plain_mlp_rules, activation=squared_relu_flags, norms=CENTRED_LAYER_NORM, partial=True),
        defaults={"partial_rotary_factor": 0.5},
    ),
    family_of_decoder(
        "StableLM",
        "StableLM 2, 3B",
        ("stablelm",),
        Decoder(partial(biased, key="use_qkv_bias"), norms=LAYER_NORM, partial=True, refused=_stablelm_refused),
        defaults={"partial_rotary_factor": 0.25},
        carried=(r"model\.layers\.\d+\.self_attn\.[qk]_layernorm\.",),
    ),
    family_of_decoder("Granite", "Granite 3", ("granite",), GRANITE, features=FACTORED),
    family_of_decoder(
        "Granite, windows",
        "Granite with sliding windows",
        ("granite_swa",),
        replace(GRANITE, sinks=True, windows=_three_windows, unplaced=_granite_unplaced, refused=_granite_refused),
        features=FACTORED,
    ),
)
