"""What a Hugging Face folder computes, by transformers' own layers: the judge of conversions, in a process of its own.

    python -m megatron_mtp.checkpoint.reference FOLDER TOKENS OUTPUT [FOLDER TOKENS OUTPUT ...]

Nothing here knows the rules of the conversion or Megatron. Trunk and layers are transformers' classes; the frame of a
depth (two norms, a projection of both halves, a final norm) is transformers' `MtpLayer`, filled by the names below,
which are those that serving engines load. TOKENS and OUTPUT are safetensors: `tokens` [1, S] in, and out `trunk` and
`depth 1` ..: logits [S, V] at every slot, depth d seeing the token d slots later, teacher-forced, for S - D slots.
"""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

Names = Callable[[int, int], str]
"""From a depth (from 0) and the number of trunk layers to the prefix of its tensors."""


@dataclass(frozen=True)
class DepthForm:
    """How a family stores its depths.

    Attributes:
        prefix: of the depth's tensors.
        renames: the family's names to those of `MtpLayer`, longest first; the rest lies in `mtp_block`.
        hidden_first: which half of the projection comes first.
        post_norm: whether a norm follows the layer.
        chained_before_norm: what the next depth, and the first of the trunk, gets is the state before the final norm.
    """

    prefix: Names
    renames: dict[str, str]
    hidden_first: bool = False
    post_norm: bool = True
    chained_before_norm: bool = False
    outside: dict[str, str] = field(default_factory=dict)
    trunk_class: str | None = None


_DEEPSEEK = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": "post_norm.",
    "embed_tokens.": "",
    "shared_head.head.": "",
}
_MIMO = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "post_norm.",
}


def _after_trunk(depth: int, layers: int) -> str:
    return f"model.layers.{layers + depth}."


FORMS: dict[str, DepthForm] = {
    "deepseek_v3": DepthForm(_after_trunk, _DEEPSEEK),
    "kimi_k2": DepthForm(_after_trunk, _DEEPSEEK, trunk_class="deepseek_v3"),
    "glm4_moe": DepthForm(_after_trunk, _DEEPSEEK),
    "mimo": DepthForm(lambda depth, _: f"model.mtp_layers.{depth}.", _MIMO, hidden_first=True, trunk_class="qwen2"),
}
"""Families whose depths can be judged."""


def main(folder: Path, tokens: Path, output: Path) -> None:
    """Compute and write all logits."""
    tokens_BS = load_file(tokens)["tokens"]
    with torch.no_grad():
        save_file({name: value.contiguous() for name, value in all_logits(folder, tokens_BS).items()}, output)


def all_logits(folder: Path, tokens_BS: Tensor) -> dict[str, Tensor]:
    """Logits of the trunk and of every depth, float32."""
    raw_type, config = _config(folder)
    plain = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, **plain)
    model.eval()
    hidden_BSH = model.model(tokens_BS).last_hidden_state
    out = {"trunk": model.lm_head(hidden_BSH)[0]}
    form = FORMS.get(raw_type)
    depths = _depths(folder, form, config.num_hidden_layers) if form else 0
    slots = tokens_BS.size(1) - depths
    state_BSH = hidden_BSH[:, :slots]
    for depth in range(depths):
        assert form is not None
        layer = _depth(folder, model, form, depth)
        embedded_BSH = model.get_input_embeddings()(tokens_BS[:, depth + 1 : depth + 1 + slots])
        state_BSH = _run(layer, model, embedded_BSH, state_BSH)
        out[f"depth {depth + 1}"] = model.lm_head(state_BSH)[0]
    return out


def _config(folder: Path) -> tuple[str, Any]:
    """The family's type, and the config of the class in transformers that is its trunk."""
    keys = json.loads((folder / "config.json").read_text())
    form = FORMS.get(keys["model_type"])
    if form is not None and form.trunk_class is not None:
        own = {name: value for name, value in keys.items() if name not in ("model_type", "architectures", "auto_map")}
        return keys["model_type"], AutoConfig.for_model(form.trunk_class, **own)
    return keys["model_type"], AutoConfig.from_pretrained(folder)


def _run(layer: MtpLayer, model: Any, embedded_BSH: Tensor, state_BSH: Tensor) -> Tensor:
    slots = state_BSH.size(1)
    positions_BS = torch.arange(slots).unsqueeze(0)
    mask = torch.full((slots, slots), float("-inf")).triu(1)[None, None]
    result: Tensor = layer(
        embedded_BSH,
        state_BSH,
        position_embeddings=model.model.rotary_emb(embedded_BSH, position_ids=positions_BS),
        attention_mask=mask,
        position_ids=positions_BS,
        past_key_values=None,
    )
    return result


def _depth(folder: Path, model: Any, form: DepthForm, depth: int) -> MtpLayer:
    """`MtpLayer` of the trunk's last kind of layer, with a depth's tensors."""
    last = model.model.layers[-1]
    norm = type(last.input_layernorm)
    config = copy.deepcopy(model.config)
    config.mtp_hidden_states_first = form.hidden_first
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # depths have experts, however many layers of the trunk have none
    layer = MtpLayer(config, type(last), norm, len(model.model.layers) - 1, form.post_norm)
    state = {}
    for name, tensor in _tensors(folder, form.prefix(depth, len(model.model.layers))).items():
        own = _renamed(name, form.renames)
        if own is not None:
            state[own] = tensor.float()
    layer.load_state_dict(_packed(state, layer.state_dict()))
    return layer.eval()


def _renamed(name: str, renames: dict[str, str]) -> str | None:
    for theirs, ours in renames.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs) if ours else None
    return f"mtp_block.{name}"


def _packed(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts stored one by one, as transformers holds them: stacked, gate rows before up rows."""
    packed = dict(state)
    for name, shape in ((name, tensor.shape) for name, tensor in wanted.items() if name not in state):
        prefix, _, kind = name.rpartition(".")
        experts = range(shape[0])
        if kind == "gate_up_proj":
            both = [[packed.pop(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up")] for e in experts]
            packed[name] = torch.stack([torch.cat(pair) for pair in both])
        elif kind == "down_proj":
            packed[name] = torch.stack([packed.pop(f"{prefix}.{e}.down_proj.weight") for e in experts])
    return packed


def _depths(folder: Path, form: DepthForm, layers: int) -> int:
    count = 0
    while _tensors(folder, form.prefix(count, layers)):
        count += 1
    return count


def _tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors of a prefix, by the rest of their names."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            found |= {n.removeprefix(prefix): stream.get_tensor(n) for n in stream.keys() if n.startswith(prefix)}  # noqa: SIM118
    return found


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    for start in range(0, len(paths), 3):
        main(*paths[start : start + 3])
