"""drafter-to-hf and attach-drafter: the drafter of a checkpoint as a folder, and back."""

import json
from argparse import Namespace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.drafter_codec import CODECS
from megatron_mtp.checkpoint.convert.drafter_form import (
    VOCABULARY,
    WORDS,
    DrafterForm,
    head_key,
    read_drafter,
    stored_form,
)
from megatron_mtp.checkpoint.convert.edit import NewDrafts, changed
from megatron_mtp.checkpoint.convert.export_hf import FolderFiles
from megatron_mtp.checkpoint.convert.import_hf import group_of
from megatron_mtp.checkpoint.convert.plan import stored_key
from megatron_mtp.checkpoint.convert.stream import Conversion, Entry, Group, Options
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.megatron.checkpoint import DRAFTER, EMBEDDING
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.arguments import check_trainable, layers_to_read, stored_with
from megatron_mtp.spec.kinds import DRAFTERS, fitted_kind

# --- a folder of a checkpoint's drafter -------------------------------------------------------------------------------


def plan_drafter(source: Path, options: Options) -> Conversion:
    """`drafter-to-hf`: the drafter of a checkpoint as a folder that vLLM, SGLang and others load beside the trunk's.

    Raises:
        ValueError: the checkpoint has no drafter, or engines have no form for it.
    """
    reader = DistReader(source)
    if not reader.has_drafter:
        raise ValueError(
            f"{source} has no drafter; train one with megatron-mtp train --drafter {fitted_kind().name} --load "
            f"{source}."
        )
    args = reader.common()["args"]
    form = stored_form(args, reader)
    keys = config_keys(args, form)
    groups = [_group(rule, reader, options) for rule in form.rules(head_key(reader)) if rule.hf]
    keys["torch_dtype"] = str(groups[0].entries[0].dtype).removeprefix("torch.")

    def keep(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(keys, indent=2) + "\n")

    return Conversion(
        (source,),
        form.architecture,
        0,
        [groups],
        {"source": reader.fingerprint(), "config": keys},
        lambda folder, options: FolderFiles(folder, [groups], options),
        keep,
    )


def config_keys(args: Namespace, form: DrafterForm) -> dict[str, Any]:
    """The keys of config.json."""
    kind, row = form.kind, DRAFTERS[form.kind.kind]
    return {
        "architectures": [form.architecture],
        "model_type": row.model_type if kind.attention.latents is None else row.latent_model_type,
        **form.sizes,
        "intermediate_size": kind.ffn,
        "max_position_embeddings": args.max_position_embeddings,
        "num_hidden_layers": kind.depth,
        "num_target_layers": layers_to_read(args),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "target_hidden_size": args.hidden_size,
        "draft_vocab_size": len(form.order_N),
        **CODECS[kind.kind].keys(kind),
    }


def _group(rule: Rule, reader: DistReader, options: Options) -> Group:
    stored = [(stored_key(piece, reader), piece) for piece in rule.mcore]
    kept = reader.dtype(stored[0][0])
    types = [torch.bool if one.name == "t2d" else options.cast(one.name, kept) for one in rule.hf]
    entries = [Entry([one.name], one.shape or (), kind) for one, kind in zip(rule.hf, types, strict=True)]
    size = sum(prod(piece.shape or ()) * kept.itemsize for _, piece in stored)
    return Group(entries, size, lambda: rule.to_hf([reader.read(key, None, piece.shape) for key, piece in stored]))


# --- a checkpoint with a folder's drafter -----------------------------------------------------------------------------


def plan_attaching_drafter(source: Path, drafter: Path, count: str | None = None) -> Conversion:
    """`attach-drafter`, from names and shapes alone, unless the folder has an embedding.

    Args:
        source: the trunk's checkpoint; MTP layers or another drafter in it are left out.
        drafter: the drafter's folder.
        count: what its layer ids count, of `COUNTS`; None for what their key says.

    Raises:
        ValueError: the drafter is of another kind or of another trunk, has an embedding of its own, or Megatron cannot
            run the trunk.
    """
    reader = DistReader(source)
    args = reader.common()["args"]
    check_trainable(args, str(source))
    form, folder = read_drafter(drafter, args, count), HFFolder(drafter)
    record = {
        "drafter": str(drafter.resolve()),
        "tensors": {name: one.shape for name, one in folder.tensors.items()},
        "layers": form.kind.layers,
    }
    if form.has_embedding:
        _check_embedding(folder.read(WORDS), reader.read(EMBEDDING), drafter)
    groups = [_stored(rule, folder) for rule in form.rules() if rule.mcore[0].key.startswith(DRAFTER)]
    return changed(reader, source, NewDrafts(0, groups, record, stored_with(form.kind, args)))


def _check_embedding(theirs_VH: Tensor, ours_VH: Tensor, folder: Path) -> None:
    """Raises ValueError unless an embedding is the trunk's, in any type."""
    if not torch.allclose(theirs_VH.float(), ours_VH[: len(theirs_VH)].float(), rtol=1e-2, atol=1e-5):
        raise ValueError(
            f"{folder}: '{WORDS}' is not the trunk's embedding, which drafters here draft with; give a drafter that "
            "was trained for this trunk, with its embedding as it is."
        )


def _stored(rule: Rule, folder: HFFolder) -> Group:
    """The tensors of a rule; ids of tokens are int64, and may have no list in the folder."""
    if (piece := rule.mcore[0]).key != VOCABULARY:
        return group_of(folder, rule, Options())

    def ids() -> Tensor:
        return rule.to_mcore([folder.read(one.name).long() for one in rule.hf])[0]

    return Group.single(VOCABULARY, piece.shape or (), torch.int64, ids)
