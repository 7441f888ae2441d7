"""MiMo-7B: a Qwen2 trunk, and depths under `model.mtp_layers` whose projection has the hidden half first."""

from argparse import Namespace
from typing import Any

from megatron_mtp.checkpoint.families.blocks import GQA, Frame, Place, depth_frame, depth_layer
from megatron_mtp.checkpoint.families.family import Depths, Family, Layout
from megatron_mtp.checkpoint.families.flags import dense_flags
from megatron_mtp.checkpoint.families.llama import QWEN2, dense_layer
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trained import TrainedForm
from megatron_mtp.checkpoint.families.trunk import STORED_HEAD, ZERO_QKV_BIAS, frame, gqa, layers, trunk_places
from megatron_mtp.checkpoint.hf.config import HFConfig


def _attention(config: HFConfig, layout: Layout) -> GQA:
    return gqa(config, bias=config.flag("attention_bias"), zero_bias=layout.has(ZERO_QKV_BIAS))


def _rules(config: HFConfig, layout: Layout) -> list[Rule]:
    attention, width = _attention(config, layout), config.integer("intermediate_size")
    rules = frame(config, layout)
    for place in trunk_places(layers(config)):
        rules += dense_layer(place, attention, width)
    for depth in range(layout.depths):
        hf = f"model.mtp_layers.{depth}."
        names = Frame.under(hf, "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        rules += depth_frame(depth, attention.hidden, names, hidden_first=True)
        rules += dense_layer(Place(hf, depth_layer(depth)), attention, width)
    return rules


def _flags(config: HFConfig, layout: Layout) -> list[str]:
    return dense_flags(config, _attention(config, layout), layout.depths)


def _trained_keys(args: Namespace) -> dict[str, Any]:
    if args.num_experts or args.qk_layernorm or args.rotary_percent != 1.0:
        raise ValueError("--family mimo needs a dense model without --qk-layernorm and --rotary-percent.")
    return {"attention_bias": True, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}


CONFIG_CLASS = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""transformers has no class of this `model_type`, so engines read the config through this one."""

MIMO = Family(
    "MiMo-7B",
    "MiMo-7B",
    ("mimo",),
    _rules,
    depths=Depths(r"^model\.mtp_layers\.(\d+)\.input_proj\.weight$", embedding_first=False),
    features=STORED_HEAD,
    flags=_flags,
    trained=TrainedForm(
        models="dense with depths, `--family mimo`",
        engines=("vLLM", "SGLang"),
        architecture="MiMoForCausalLM",
        keys=_trained_keys,
        fits=lambda args, depths: False,
        files={"configuration_mimo.py": CONFIG_CLASS},
    ),
    defaults={**QWEN2.defaults, "attention_bias": True},
)
