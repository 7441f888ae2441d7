"""How each family stores its MTP layers, as engines load them: names, order of the halves, layers. For reference.py.

This deliberately repeats facts of `checkpoint/families` without sharing code: a mistake in a rule must not be in its
own verification as well.

In names, {k} is the depth from 0, and {n} the index after the trunk's layers. If an MTP layer has several layers,
{flat} counts the layers of all MTP layers, and {first} and {last} are the first and last layer of the depth.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_mtp.checkpoint.families.family import NAMES_ALONE, computing
from megatron_mtp.checkpoint.hf.config import CONFIG, read_json
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.quantized import QuantizationSettings
from megatron_mtp.spec.kinds import DRAFTERS
from megatron_mtp.spec.registry import Registry

FolderTensors = dict[str, Tensor]


@dataclass(frozen=True)
class DepthForm:
    """MTP layers of a family, as its folders store them.

    Attributes:
        layer: prefix of the tensors of the layer inside an MTP layer.
        frame: names of the parts around it: `enorm`, `hnorm`, `eh_proj`, `norm` if one follows the layer, and
            `embedding` and `head` if an MTP layer has or repeats them.
        hidden_first: whether the projection has the hidden half first.
        before_norm: whether the input of an MTP layer is the state before the final norm of the trunk or the depth
            before.
        trunk_type: `model_type` of the trunk's class in transformers, "text" for that of the text model in the config;
            None for the family's own.
        keys: the family's config keys to the keys of that class.
        absent: values of keys that a config may leave out, if they differ from the defaults of that class.
        named: renames all tensors to the names of that class.
        around: wraps the config, if transformers has only a larger model around the trunk.
        row: number of layers of an MTP layer, from the config.
    """

    layer: str
    frame: dict[str, str]
    hidden_first: bool = False
    before_norm: bool = False
    trunk_type: str | None = None
    keys: dict[str, str] = field(default_factory=dict)
    absent: dict[str, Any] = field(default_factory=dict)
    named: Callable[[Any, FolderTensors], FolderTensors] = lambda config, tensors: tensors
    around: Callable[[Any], Any] = lambda config: config
    row: Callable[[Any], int] = lambda config: 1


def config_of(folder: Path) -> tuple[DepthForm | None, Any]:
    """Return the form of a folder's family (None if unknown), and the config of the trunk's class in transformers."""
    keys = read_json(folder / CONFIG)
    form = FORMS.get(keys["model_type"])
    if form is None or form.trunk_type is None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.__dict__.pop("quantization_config", None)  # the tensors are passed in bfloat16
        return form, config if form is None else form.around(config)
    text = keys.get("text_config") or keys.get("llm_config") or keys
    kind = text.get("model_type") if form.trunk_type == "text" else form.trunk_type
    own = {form.keys.get(name, name): value for name, value in text.items() if name not in _NOT_THE_TRUNKS}
    return form, form.around(AutoConfig.for_model(kind, **form.absent | own))


_NOT_THE_TRUNKS = ("model_type", "architectures", "auto_map", "quantization_config", "time_step_limit")


def depth_tensors(tensors: FolderTensors, form: DepthForm, config: Any, depth: int) -> FolderTensors:
    """Return tensors of this MTP layer: the parts of the frame, and `layers.0.` .. as in the trunk; empty if none."""
    row = form.row(config)
    places = {"k": depth, "n": config.num_hidden_layers + depth, "first": depth * row, "last": (depth + 1) * row - 1}
    frame = {part: name.format(**places) for part, name in form.frame.items()}
    found: FolderTensors = {}
    for index in range(row):
        prefix = form.layer.format(**places, flat=depth * row + index)
        own = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        inside = {name: own[name] for name in own if prefix + name not in frame.values()}
        found |= {f"layers.{index}.{name}": tensor for name, tensor in inside.items()}
    return found and found | {part: tensors[name] for part, name in frame.items() if name in tensors}


def read_tensors(folder: Path) -> FolderTensors:
    """Tensors of a folder, floating-point ones in float32, read and dequantized without `checkpoint/hf`.

    A weight is multiplied by a scale only if it is FP8 itself; MXFP4 is unpacked by transformers. Forms of packed
    integers and NVFP4 are decoded by `checkpoint/hf`, whose bits tests compare with the forms' own libraries.
    """
    stored: FolderTensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= {} if file.name.startswith("consolidated") else load_file(file)
    numbers = QuantizationSettings.of(folder, read_json(folder / CONFIG)).numbers
    for name in list(stored):
        weight = name.removesuffix("_blocks")
        names = f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale"
        scale = next((one for one in names if one in stored), None)
        if name.endswith("_blocks") and f"{weight}_scales" in stored:
            stored[weight] = convert_moe_packed_tensors(stored.pop(name), stored.pop(f"{weight}_scales"))
        elif scale is not None and stored[name].is_floating_point() and stored[name].element_size() == 1:
            stored[name] = _dequantized(stored[name].float(), _factors(stored.pop(scale)), numbers.block)
    ours = HFFolder(folder, numbers)
    packed = {name: ours.read(name) for name in ours.tensors if name not in stored or _is_packed(stored[name])}
    stored = {name: tensor for name, tensor in stored.items() if name in ours.tensors} | packed
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}


def _is_packed(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int8, torch.uint8)


def _factors(scale: Tensor) -> Tensor:
    """Return scales in float32; a byte b is 2 ** (b - 127)."""
    return torch.exp2(scale.double() - 127).float() if scale.dtype == torch.uint8 else scale.float()


def _dequantized(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return values times the scale of the tensor, each row, each block, or (MXFP8) 32 numbers; bfloat16."""
    if scale.shape == (*weight.shape[:-1], weight.size(-1) // 32):
        block = (1, 32)
    if scale.shape == weight.shape[:-1]:
        scale = scale.unsqueeze(-1)
    if scale.numel() > 1 and scale.shape[-2:] != (weight.size(-2), 1):
        scale = torch.kron(scale, torch.ones(block))[..., : weight.size(-2), : weight.size(-1)]
    return (weight * scale).bfloat16()


def _under(prefix: str, **parts: str) -> dict[str, str]:
    return {part: f"{prefix}{name}.weight" for part, name in parts.items()}


def _without_limit(config: Any) -> Any:
    """Remove the limit of time steps, as in the published code; transformers' class reads this value as a limit."""
    config.time_step_min = 1e-30
    return config


def _as_glm(config: Any, tensors: FolderTensors) -> FolderTensors:
    """Return Bailing-MoE V2's tensors as GLM-4 MoE's, which computes the same.

    The fused projection has queries first.
    """
    width = config.head_dim
    rows = [config.num_attention_heads * width, *[config.num_key_value_heads * width] * 2]
    out: FolderTensors = {}
    for name, tensor in tensors.items():
        for bailing, glm in _BAILING.items():
            name = name.replace(bailing, glm)
        if "query_key_value" in name:
            out |= {
                name.replace("query_key_value", f"{x}_proj"): t for x, t in zip("qkv", tensor.split(rows), strict=True)
            }
        else:
            out[name] = tensor
    return out


_BAILING = {
    "word_embeddings": "embed_tokens",
    "attention.dense": "attention.o_proj",
    "attention.query_layernorm": "attention.q_norm",
    "attention.key_layernorm": "attention.k_norm",
    ".attention.": ".self_attn.",
    "gate.expert_bias": "gate.e_score_correction_bias",
}
_BAILING_ABSENT = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "use_qk_norm": True,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000.0,
    "partial_rotary_factor": 1.0,
    "n_group": 8,
    "topk_group": 4,
}
_SARVAM_ABSENT = {"head_dim": 64, "use_qk_norm": True, "partial_rotary_factor": 1.0, "rope_theta": 8e6}


def _alone(prefixes: dict[str, str]) -> Callable[[Any, FolderTensors], FolderTensors]:
    """Return the text model's tensors under its own names; the prefixes are those in the whole model, and alone."""

    def named(config: Any, tensors: FolderTensors) -> FolderTensors:
        found = {name: next((theirs for theirs in prefixes if name.startswith(theirs)), None) for name in tensors}
        return {prefixes[p] + n.removeprefix(p): tensors[n] for n, p in found.items() if p is not None}

    return named


def _stacked(config: Any, tensors: FolderTensors) -> FolderTensors:
    """Stack the depth's experts into two tensors, as in transformers' class.

    Published folders may store each expert.
    """
    experts: dict[str, dict[int, Tensor]] = {"gate": {}, "up": {}, "down": {}}
    out = dict(tensors)
    for name in tensors:
        if found := re.fullmatch(r"mtp\.layers\.0\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name):
            experts[found[2]][int(found[1])] = out.pop(name)
    if experts["gate"]:
        gate, up, down = (torch.stack([own[index] for index in sorted(own)]) for own in experts.values())
        out["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        out["mtp.layers.0.mlp.experts.down_proj"] = down
    return out


_NUMBERED = "model.layers.{n}."
_HALVES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
_DEEPSEEK = _under(_NUMBERED, **_HALVES, norm="shared_head.norm", embedding="embed_tokens", head="shared_head.head")
_QWEN = _under("mtp.", enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden", eh_proj="fc", norm="norm")
_MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"}
_NEMOTRON = {**_under("mtp.layers.{first}.", **_HALVES), "norm": "mtp.layers.{last}.final_layernorm.weight"}
_QWEN_FORM = DepthForm("mtp.layers.{k}.", _QWEN, named=_stacked)
_OCR = "model.language_model.layers.{n}."
_BAILING_FORM = DepthForm(
    _NUMBERED,
    _under(_NUMBERED, **_HALVES, norm="final_layernorm"),
    trunk_type="glm4_moe",
    keys={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    absent=_BAILING_ABSENT,
    named=_as_glm,
)
_NEMOTRON_FORM = DepthForm(
    "mtp.layers.{flat}.",
    _NEMOTRON,
    around=_without_limit,
    row=lambda config: len(config.mtp_layers_block_type),
)

_OWN = {
    "deepseek_v3": DepthForm(_NUMBERED, _DEEPSEEK),
    "kimi_k2": DepthForm(_NUMBERED, _DEEPSEEK, trunk_type="deepseek_v3"),
    "glm4_moe": DepthForm(_NUMBERED, _DEEPSEEK),
    "glm4_moe_lite": DepthForm(_NUMBERED, _DEEPSEEK),
    "hy_v3": DepthForm(_NUMBERED, _under(_NUMBERED, **_HALVES, norm="final_layernorm")),
    "mimo": DepthForm(
        "model.mtp_layers.{k}.", _under("model.mtp_layers.{k}.", **_MIMO), hidden_first=True, trunk_type="qwen2"
    ),
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), _BAILING_FORM),
    "sarvam_moe": replace(_BAILING_FORM, absent=_SARVAM_ABSENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN_FORM),
    "intern_s2_preview": replace(
        _QWEN_FORM,
        trunk_type="text",
        named=_alone({"model.language_model.": "model.", "lm_head.": "lm_head.", "mtp.": "mtp."}),
    ),
    **dict.fromkeys(
        ("got_ocr2 idefics3 internvl lighton_ocr llava llava_onevision mistral3 smolvlm video_llava vipllava").split(),
        DepthForm("mtp.layers.{k}.", _under("mtp.layers.{k}.", **_HALVES, norm="final_layernorm")),
    ),
    "glm4v_moe": DepthForm(
        _OCR,
        _under(_OCR, **_HALVES, norm="shared_head.norm", embedding="embed_tokens", head="shared_head.head"),
    ),
    "sarvam_mla": DepthForm(
        _NUMBERED,
        _DEEPSEEK,
        trunk_type="deepseek_v3",
        keys={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        absent={"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "nemotron_h": _NEMOTRON_FORM,
    "nemotron_h_omni": replace(_NEMOTRON_FORM, trunk_type="nemotron_h", named=_alone({"language_model.": ""})),
    **dict.fromkeys(
        ("nemo_speechlm", "nemotron3_5_transcribe"),
        replace(
            _NEMOTRON_FORM,
            trunk_type="nemotron_h",
            named=_alone(
                {
                    "llm.model.embed_tokens.": "backbone.embeddings.",
                    "llm.model.norm.": "backbone.norm_f.",
                    "llm.model.": "backbone.",
                    "llm.": "",
                }
            ),
        ),
    ),
}
FORMS: Registry[DepthForm] = Registry("megatron_mtp.reference_forms", _OWN)
"""Descriptions by `model_type`; other packages register theirs."""


def whole_config(folder: Path) -> dict[str, Any]:
    """Return every key that may change the logits of text, nested keys as `outer.inner`.

    Keys that transformers' class does not know are left out. Without a class for the `model_type`, only the file's keys
    are returned.

    Args:
        folder: folder with a `config.json`.
    """
    try:
        config = config_of(folder)[1]
        keys = config.to_dict()
    except Exception:  # transformers raises many types for an unknown config
        return computing(read_json(folder / CONFIG))
    unknown = _unknown(config, keys)
    return computing({name: value for name, value in keys.items() if name not in unknown})


def unknown_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of a folder's config that transformers' class does not know; empty if there is no class."""
    try:
        config = config_of(folder)[1]
        keys = config.to_dict()
    except Exception:  # see above
        return {}
    return {name: keys[name] for name in _unknown(config, keys)}


def _unknown(config: Any, keys: dict[str, Any]) -> set[str]:
    """Return names that neither the class nor an engine reads, except MTP layer counts and rotary settings."""
    try:
        known = type(config)().to_dict()
    except Exception:  # a class without defaults
        return set()
    return {name for name in keys if name not in known and name not in NAMES_ALONE and not _READ.search(name)}


_READ = re.compile("|".join(("mtp", "nextn", "draft", "rope", "rotary", *DRAFTERS)))
