"""drafter-to-hf and attach-drafter: the drafter of a checkpoint as a folder, and back."""

import json
from argparse import Namespace
from dataclasses import replace
from functools import partial
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
from megatron_mtp.checkpoint.convert.stored import stored_key
from megatron_mtp.checkpoint.convert.stream import Conversion, Entry, Group, Options
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.hf.config import CONFIG
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.megatron.checkpoint import DRAFTER, EMBEDDING
from megatron_mtp.megatron.checkpoint.reader import DistReader
from megatron_mtp.model.arguments import check_trainable, layers_to_read, trunk_spec
from megatron_mtp.model.initialize import RandomWeights
from megatron_mtp.model.stored_arguments import stored_with
from megatron_mtp.spec.head import HeadSpec
from megatron_mtp.spec.kinds import DRAFTERS, fitted_kind

# --- a folder of a checkpoint's drafter -------------------------------------------------------------------------------


def plan_drafter(source: Path, options: Options) -> Conversion:
    """Plan `drafter-to-hf`: export the drafter of a checkpoint to a folder that vLLM, SGLang and others load.

    Raises:
        ValueError: the checkpoint has no drafter, or engines have no format for it.
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
    """Return the keys of config.json."""
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


def plan_attaching_drafter(
    source: Path, drafter: Path, count: str | None = None, as_kind: str | None = None
) -> Conversion:
    """Plan `attach-drafter`, from names and shapes alone unless the folder has an embedding.

    Args:
        source: the trunk's checkpoint; MTP layers or another drafter in it are left out.
        drafter: the drafter's folder.
        count: one of `COUNTS`, what its layer ids count; None for the meaning of their key.
        as_kind: kind of the new drafter, if it has all weights of the folder's; its other weights are drawn as in a new
            drafter. None for the folder's kind.

    Raises:
        ValueError: the drafter is of another kind or for another trunk, has its own embedding, cannot initialize
            `as_kind`, or Megatron cannot run the trunk.
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
    if as_kind in (None, form.kind.kind):
        return changed(reader, source, NewDrafts(0, groups, record, stored_with(form.kind, args)))
    kind, drawn = _begun(form, str(as_kind), args, groups[0].entries[0].dtype, drafter)
    record["as_kind"] = as_kind
    return changed(reader, source, NewDrafts(0, groups + drawn, record, stored_with(kind, args)))


def _begun(
    form: DrafterForm, name: str, args: Namespace, dtype: torch.dtype, folder: Path
) -> tuple[HeadSpec, list[Group]]:
    """Create a drafter of another kind from a folder's weights; draw its further tensors at random.

    Its rows draft the tokens that they drafted.

    Raises:
        ValueError: drafters of that kind have not all of its weights.
    """
    row, theirs, drafted = DRAFTERS[name], DRAFTERS[form.kind.kind], len(form.order_N)
    refusal = ValueError(
        f"{folder} is {theirs.called}, and {row.called} has not all of its weights; give a kind that has, or drop "
        "--as-kind."
    )
    if drafted < form.kind.vocabulary and row.drafts_all:
        raise ValueError(
            f"{folder} drafts {drafted} of {form.kind.vocabulary} tokens, and {row.called} drafts from all; give one "
            "without a draft vocabulary."
        )
    trunk = trunk_spec(args)
    given = form.kind.arguments(trunk) | {"drafter_idle_rows": form.kind.idle_rows}
    try:
        kind = HeadSpec.resolve(name, given, trunk)
    except ValueError:
        raise refusal from None
    begun = replace(form, kind=kind)
    new = {piece.key: piece.shape or () for rule in begun.rules() for piece in rule.mcore}
    kept = {piece.key for rule in form.rules() for piece in rule.mcore}
    if not kept <= new.keys() or kind.idle_rows != form.kind.idle_rows:
        raise refusal
    weights = RandomWeights.of(args, args.num_layers, getattr(args, "seed", 1234))

    def drawn(key: str, shape: tuple[int, ...]) -> Tensor:
        made = weights.draw(key, shape)
        assert made is not None, key
        return made.to(dtype)

    return kind, [
        Group.single(key, shape, dtype, partial(drawn, key, shape)) for key, shape in new.items() if key not in kept
    ]


def _check_embedding(theirs_VH: Tensor, ours_VH: Tensor, folder: Path) -> None:
    """Raise ValueError unless an embedding equals the trunk's, in any type."""
    if not torch.allclose(theirs_VH.float(), ours_VH[: len(theirs_VH)].float(), rtol=1e-2, atol=1e-5):
        raise ValueError(
            f"{folder}: '{WORDS}' is not the trunk's embedding, which drafters here draft with; give a drafter that "
            "was trained for this trunk, with its embedding as it is."
        )


def _stored(rule: Rule, folder: HFFolder) -> Group:
    """Return the tensors of a rule; token ids are int64, and may be missing from the folder."""
    if (piece := rule.mcore[0]).key != VOCABULARY:
        return group_of(folder, rule, Options())

    def ids() -> Tensor:
        return rule.to_mcore([folder.read(one.name).long() for one in rule.hf])[0]

    return Group.single(VOCABULARY, piece.shape or (), torch.int64, ids)
