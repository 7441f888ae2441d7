"""Logits of a Hugging Face folder by transformers' own classes, in a separate process: the reference for conversions.

    python -m megatron_mtp.checkpoint.verify.reference FOLDER TOKENS OUTPUT [FOLDER TOKENS OUTPUT ...]

Nothing here uses the conversion rules or Megatron. The trunk is transformers' model, and the MTP layers run in
transformers' `MtpModel`, which uses DeepSeek's tensor names; reference_forms.py has those of each family. A folder that
lacks a tensor of transformers' class is rejected.

TOKENS and OUTPUT are safetensors files. TOKENS has `tokens` [1, S], `positions` [S], and whether to compute MTP layers
(`with depths`, a boolean). OUTPUT has, teacher-forced, so that depth d gets the token d positions later:

    trunk, depth 1 ..   logits [S, V] of the trunk, [S - D, V] of the MTP layers

Letters: B batch, S positions, D depths, H hidden, V vocabulary.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

from megatron_mtp.checkpoint.verify.prompt import exact_float32
from megatron_mtp.checkpoint.verify.reference_forms import (
    DepthForm,
    FolderTensors,
    config_of,
    depth_tensors,
    read_tensors,
)

PLAIN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
SEEING = ("vision", "visual", "projector")
"""Parts of models that process images, which are not needed for the logits of text."""
FRAME = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
"""Parts of an MTP layer around the inner layer (`DepthForm.frame`), by the names in which `MtpModel` reads them."""


@exact_float32()
def main(folder: Path, tokens: Path, output: Path) -> None:
    """Compute all logits of a folder on the tokens in a file, and write them to another file."""
    given = load_file(tokens)
    with torch.no_grad():
        found = all_logits(folder, given["tokens"], given["positions"], bool(given["with MTP"]))
    save_file({name: value.contiguous() for name, value in found.items()}, output)


def all_logits(
    folder: Path, tokens_BS: Tensor, positions_S: Tensor | None = None, with_depths: bool = True
) -> FolderTensors:
    """Return logits of the trunk and of every MTP layer, as above; float32.

    Args:
        folder: a Hugging Face folder.
        tokens_BS: ids [1, S].
        positions_S: positions [S] of the tokens; None for 0, 1, 2, ...
        with_depths: whether to compute the MTP layers, which may be damaged.

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
    before_BSH, after_BSH = _trunk(model.get_decoder(), words_VH[tokens_BS], positions_S)
    out = {"trunk": linear(after_BSH, head_VH)[0]}
    depths = list(_depths(form, model.get_decoder().config, tensors)) if with_depths else []
    if not depths:
        return out
    judge, length = _mtp_model(form, model, depths, str(folder)), tokens_BS.size(1) - len(depths)
    state_BSH = (before_BSH if form.before_norm else after_BSH)[:, :length]
    for index, own in enumerate(depths):
        embedded_BSH = own.get("embedding", words_VH)[tokens_BS[:, index + 1 : index + 1 + length]]
        inputs: list[Tensor] = []  # inputs of the MTP layer's final norm
        norm = judge.layers[index].post_norm or torch.nn.Identity()
        hook = norm.register_forward_hook(lambda _, args, out, kept=inputs: kept.append(args[0]))
        cache, positions_BS = MtpCache(), positions_S[:length].unsqueeze(0)
        after_BSH = judge.forward_layer(index, state_BSH, positions_BS, cache, inputs_embeds=embedded_BSH)
        hook.remove()
        out[f"depth {index + 1}"] = linear(after_BSH, own.get("head", head_VH))[0]
        state_BSH = inputs[0] if form.before_norm else after_BSH
    return out


def quieten() -> None:
    """Silence transformers. Missing tensors are raised here as an error of one sentence."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _trunk(decoder: Any, hidden_BSH: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states before and after the final norm, from the input of the first layer."""
    seen: list[Tensor] = []
    final = decoder.norm_f if hasattr(decoder, "norm_f") else decoder.norm
    hook = final.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    # Without a mask, transformers treats a gap between positions as the start of another sequence.
    mask_BS, positions_BS = torch.ones_like(positions_S).unsqueeze(0), positions_S.unsqueeze(0)
    decoder(inputs_embeds=hidden_BSH, position_ids=positions_BS, attention_mask=mask_BS, use_cache=False)
    hook.remove()
    before_BSH, after_BSH = seen
    return before_BSH, after_BSH


def _whole(model: Any, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
    """Return logits [S, V] as the model's class computes them, with its factors of embedding and logits."""
    mask_BS = torch.ones_like(tokens_BS)
    out = model(tokens_BS, position_ids=positions_S.unsqueeze(0), attention_mask=mask_BS, use_cache=False)
    logits_SV: Tensor = out.logits[0]
    return logits_SV


# --- the MTP layers --------------------------------------------------------------------------------------------------


def _depths(form: DepthForm, config: Any, tensors: FolderTensors) -> Iterator[FolderTensors]:
    """Return the tensors of every MTP layer."""
    depth = 0
    while own := depth_tensors(tensors, form, config, depth):
        yield own
        depth += 1


def _mtp_model(form: DepthForm, model: Any, depths: list[FolderTensors], what: str) -> Any:
    """Return transformers' model of the MTP layers. Raise ValueError if it lacks a tensor or has other shapes."""
    text, decoder, count = model.config.get_text_config(), model.get_decoder(), len(depths)
    first, row = text.num_hidden_layers, form.row(text)
    kinds = [*text.mtp_layers_block_type] if row > 1 else ["full_attention"] * count
    for name, value in {
        "num_mtp_layers": count, "mtp_hidden_states_first": form.hidden_first,
        "mtp_layer_types": kinds, "mtp_mlp_layer_types": ["sparse"] * count,
        "mlp_only_layers": [], "decoder_sparse_step": 1,
    }.items():  # fmt: skip
        setattr(text, name, value)
    if "norm" not in depths[0]:
        text.chain_hidden_post_norm = False
    if row > 1:  # transformers builds the layers of an MTP layer with the class of the trunk's last layer
        text.rms_norm_eps = text.layer_norm_epsilon
        decoder.layers.append(row_of(type(decoder.layers[-1]))(text.get_mtp_config(), 0))
    model._keys_to_ignore_on_load_unexpected = [rf"layers\.{first + depth}\." for depth in range(count)]
    state = {f"model.layers.{first + k}.{name}": one for k, own in enumerate(depths) for name, one in _named(own, row)}
    with TemporaryDirectory() as scratch:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, Path(scratch) / "model.safetensors")
        model.config.name_or_path = scratch
        try:
            made = MtpModel.from_pretrained(model).eval()
        except RuntimeError as error:
            raise ValueError(f"{what} has MTP layers that are not what transformers' class holds: {error}") from None
    if row > 1:
        made.config.layer_types = ["full_attention"] * count  # transformers picks the mask by one entry per MTP layer
    return made


def _named(own: FolderTensors, row: int) -> Iterator[tuple[str, Tensor]]:
    """Return an MTP layer's tensors by their names in `MtpModel`, without its copies of embedding and head."""
    for name, tensor in own.items():
        if name in FRAME:
            yield f"{FRAME[name]}.weight", tensor
        elif name.startswith("layers."):
            yield name if row > 1 else name.removeprefix("layers.0."), tensor


def row_of(block: Any) -> Any:
    """Return a class of several layers in sequence, as in an MTP layer of Nemotron-H; `block` is the class of each."""

    class Row(torch.nn.Module):
        def __init__(self, config: Any, depth: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(block(config, index) for index in range(len(config.layer_types)))

        def forward(self, hidden_BSH: Tensor, **others: Any) -> Tensor:
            for layer in self.layers:
                hidden_BSH = layer(hidden_BSH, **others)
            return hidden_BSH

    return Row


# --- loading ----------------------------------------------------------------------------------------------------------


def _class_of(config: Any) -> Any:
    nested = config.get_text_config() is not config
    return (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if nested else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]


def _load(kind: Any, config: Any, tensors: FolderTensors, what: str) -> Any:
    """Load a model from these tensors by name; `what` names it in messages.

    Raises:
        ValueError: the model has other shapes, or tensors that are absent here.
    """
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=dict(tensors), output_loading_info=True, **PLAIN
        )
    except RuntimeError as error:
        raise ValueError(f"{what} is not what transformers' class holds: {error}") from None
    absent = sorted(name for name in report["missing_keys"] if not any(part in name for part in SEEING))
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ValueError(f"{what} lacks '{absent[0]}'{more}, which transformers' class has; fetch the folder again.")
    return model.eval()


if __name__ == "__main__":
    quieten()
    paths = [Path(argument) for argument in sys.argv[1:]]
    for start in range(0, len(paths), 3):
        main(*paths[start : start + 3])
