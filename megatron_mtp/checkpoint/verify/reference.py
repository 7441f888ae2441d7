"""Logits of a Hugging Face folder by transformers' own classes, in a separate process: the reference of conversions.

    python -m megatron_mtp.checkpoint.verify.reference FOLDER TOKENS OUTPUT [FOLDER TOKENS OUTPUT ...]

Nothing here uses the rules of the conversion, or Megatron. The trunk is transformers' model. A depth is a model of the
same class with one layer, whose input is the projection of both halves and whose final norm is the depth's;
reference_forms.py has the names. A folder that lacks a tensor of transformers' class is refused.

TOKENS and OUTPUT are safetensors files. TOKENS holds `tokens` [1, S], `positions` [S], and whether depths are wanted
(`with depths`, a truth value). OUTPUT holds, teacher-forced, where depth d is given the token d positions later:

    trunk, depth 1 ..   logits [S, V] of the trunk, [S - D, V] of the depths
    given state         [S - D, H], the input of the first depth, in families with depths
    given 1 ..          [S - D, H], what a depth's attention or layer adds, if Megatron cannot compute it

Letters: B batch, S positions, D depths, H hidden, V vocabulary.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging

from megatron_mtp.checkpoint.verify.prompt import exact_float32
from megatron_mtp.checkpoint.verify.reference_forms import DepthForm, Tensors, config_of, depth_tensors, read_tensors

PLAIN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
SEEING = ("vision", "visual", "projector")
"""Parts of models that read images, which the logits of text do not need."""


@exact_float32()
def main(folder: Path, tokens: Path, output: Path) -> None:
    """Compute all logits of a folder on the tokens in a file, and write them to another file."""
    given = load_file(tokens)
    with torch.no_grad():
        found = all_logits(folder, given["tokens"], given["positions"], bool(given["with depths"]))
    save_file({name: value.contiguous() for name, value in found.items()}, output)


def all_logits(folder: Path, tokens_BS: Tensor, positions_S: Tensor | None = None, with_depths: bool = True) -> Tensors:
    """Logits of the trunk and of every depth, and the inputs for Megatron's depths, as above; float32.

    Args:
        folder: a Hugging Face folder.
        tokens_BS: ids [1, S].
        positions_S: positions [S] of the tokens; None for 0, 1, 2, ...
        with_depths: whether the depths are computed, which may be damaged.

    Raises:
        ValueError: the folder lacks tensors of transformers' class.
    """
    if positions_S is None:
        positions_S = torch.arange(tokens_BS.size(1))
    form, config = config_of(folder)
    tensors = read_tensors(folder)
    if form is not None:
        tensors = form.named(config, tensors)
    model = _load(_class_of(config), config, tensors, str(folder))
    if form is None:
        return {"trunk": _whole(model, tokens_BS, positions_S)}
    words_VH, head_VH = (part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    trunk = _run(model.get_decoder(), words_VH[tokens_BS], positions_S)
    out = {"trunk": linear(trunk.after_BSH, head_VH)[0]}
    depths = _depths(form, model.get_decoder(), tensors, str(folder)) if with_depths else []
    length = tokens_BS.size(1) - len(depths)
    state_BSH = trunk.state(form)[:, :length]
    out["given state"] = state_BSH[0]
    for number, depth in enumerate(depths, start=1):
        own_VH = depth.tensors.get("embedding", words_VH)
        ran = depth.run(own_VH[tokens_BS[:, number : number + length]], state_BSH, positions_S[:length])
        state_BSH = ran.state(form)
        out[f"depth {number}"] = linear(ran.after_BSH, depth.tensors.get("head", head_VH))[0]
        if ran.added_BSH is not None:
            out[f"given {number}"] = ran.added_BSH[0]
    return out


def quieten() -> None:
    """Silence transformers: missing tensors are raised here as an error of one sentence."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@dataclass
class Ran:
    """Results of a model's forward.

    Attributes:
        before_BSH, after_BSH: hidden states before and after the final norm.
        added_BSH: what the attention or the layer added to the residual stream; None if not asked for.
    """

    before_BSH: Tensor
    after_BSH: Tensor
    added_BSH: Tensor | None = None

    def state(self, form: DepthForm | None) -> Tensor:
        """The input of the next depth."""
        return self.before_BSH if form is not None and form.before_norm else self.after_BSH


@dataclass(frozen=True)
class Depth:
    """A depth of a folder.

    Attributes:
        form: how the family stores its depths.
        tensors: tensors of the depth, by the names of `DepthForm`.
        model: a model of the trunk's class with the depth's layers.
        norm: a norm of the trunk, to make the depth's input norms from.
    """

    form: DepthForm
    tensors: Tensors
    model: Any
    norm: torch.nn.Module

    def run(self, embedded_BSH: Tensor, state_BSH: Tensor, positions_S: Tensor) -> Ran:
        """Run the depth on the embeddings of its tokens and the hidden states of the depth before.

        Args:
            embedded_BSH: embeddings of the tokens that this depth adds.
            state_BSH: hidden states of the trunk or the depth before.
            positions_S: positions of the sequence.
        """
        halves = [self._norm("enorm")(embedded_BSH), self._norm("hnorm")(state_BSH)]
        both_BS2H = torch.cat(halves[::-1] if self.form.hidden_first else halves, dim=-1)
        return _run(self.model, linear(both_BS2H, self.tensors["eh_proj"]), positions_S, self.form.given)

    def _norm(self, part: str) -> torch.nn.Module:
        norm = copy.deepcopy(self.norm)
        norm.load_state_dict({"weight": self.tensors[part]})
        return norm


def _run(decoder: Any, hidden_BSH: Tensor, positions_S: Tensor, given: str | None = None) -> Ran:
    """Run a model from the input of its first layer, without embedding and head; `given` is as in `DepthForm`."""
    seen: list[Tensor] = []
    attended: list[Tensor] = []
    hooks = [_final_norm(decoder).register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))]
    if given == "attention":
        hooks.append(decoder.layers[0].self_attn.register_forward_hook(lambda _, args, out: attended.append(out[0])))
    # Without a mask, transformers treats a gap between positions as the start of another sequence.
    mask_BS, positions_BS = torch.ones_like(positions_S).unsqueeze(0), positions_S.unsqueeze(0)
    decoder(inputs_embeds=hidden_BSH, position_ids=positions_BS, attention_mask=mask_BS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return Ran(*seen, *([seen[0] - hidden_BSH] if given == "layer" else attended))


def _whole(model: Any, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
    """Logits [S, V] of a model as its class computes them, with factors of embedding and logits if it has them."""
    mask_BS = torch.ones_like(tokens_BS)
    out = model(tokens_BS, position_ids=positions_S.unsqueeze(0), attention_mask=mask_BS, use_cache=False)
    logits_SV: Tensor = out.logits[0]
    return logits_SV


def _final_norm(decoder: Any) -> torch.nn.Module:
    norm: torch.nn.Module = decoder.norm_f if hasattr(decoder, "norm_f") else decoder.norm
    return norm


def _depths(form: DepthForm, trunk: Any, tensors: Tensors, folder: str) -> list[Depth]:
    """All depths among the tensors."""
    depths: list[Depth] = []
    while own := depth_tensors(tensors, form, trunk.config, len(depths)):
        layers = _layers(form, trunk, own, len(depths), folder)
        depths.append(Depth(form, own, layers, _final_norm(trunk)))
    return depths


def _layers(form: DepthForm, trunk: Any, own: Tensors, depth: int, folder: str) -> Any:
    """A depth's layers as a model of the trunk's class; without a final norm its output is the hidden state."""
    config = copy.deepcopy(trunk.config)
    config.num_hidden_layers = 1
    for name, value in form.layers(config, depth, own).items():
        setattr(config, name, value)
    words_VH, final = trunk.get_input_embeddings().weight, _final_norm(trunk)
    words = next(name for name, parameter in trunk.named_parameters() if parameter is words_VH)
    norm = next(name for name, module in trunk.named_children() if module is final)
    state = {name: tensor for name, tensor in own.items() if name.startswith("layers.")}
    state |= {words: words_VH, f"{norm}.weight": own.get("norm", torch.ones(config.hidden_size))}
    model = _load(type(trunk), config, state, f"{folder}: depth {depth + 1}", form.rest_is_zero)
    if "norm" not in own:
        setattr(model, norm, torch.nn.Identity())
    return model


def _class_of(config: Any) -> Any:
    nested = config.get_text_config() is not config
    return (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if nested else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]


def _load(kind: Any, config: Any, tensors: Tensors, what: str, rest_is_zero: bool = False) -> Any:
    """A model of these tensors by name; `what` names it in messages.

    Raises:
        ValueError: the model has other shapes, or tensors that are absent here, unless these are zero.
    """
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=dict(tensors), output_loading_info=True, **PLAIN
        )
    except RuntimeError as error:
        raise ValueError(f"{what} is not what transformers' class holds: {error}") from None
    absent = sorted(name for name in report["missing_keys"] if not any(part in name for part in SEEING))
    if absent and not rest_is_zero:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ValueError(f"{what} lacks '{absent[0]}'{more}, which transformers' class has; fetch the folder again.")
    for name in absent:
        model.state_dict()[name].zero_()
    return model.eval()


if __name__ == "__main__":
    quieten()
    paths = [Path(argument) for argument in sys.argv[1:]]
    for start in range(0, len(paths), 3):
        main(*paths[start : start + 3])
