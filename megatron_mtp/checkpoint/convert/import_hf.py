"""hf-to-mcore: from a Hugging Face folder to a Megatron distributed checkpoint, a layer at a time."""

import json
import shutil
from argparse import Namespace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mtp.checkpoint.convert.plan import HFModel, carried, moved, parts_of, sides
from megatron_mtp.checkpoint.convert.stream import CheckpointFiles, Conversion, Entry, Group, Options
from megatron_mtp.checkpoint.families import Layout
from megatron_mtp.checkpoint.families.family import UntrainableError
from megatron_mtp.checkpoint.families.inside import InnerDrafter
from megatron_mtp.checkpoint.families.rules import Rule
from megatron_mtp.checkpoint.families.trained import epsilon_note
from megatron_mtp.checkpoint.hf.config import CONFIG, DRAFTED, INDEX_SHARE, HFConfig, counted_elsewhere, read_json
from megatron_mtp.checkpoint.hf.folder import HFFolder
from megatron_mtp.checkpoint.hf.quantized import SIDE_FILES, QuantizationSettings
from megatron_mtp.common.acceptance import RECORD
from megatron_mtp.common.files import without_weights
from megatron_mtp.common.record import carry_record
from megatron_mtp.megatron.checkpoint import DRAFT_VOCABULARY, HF_FILES, ORIGIN
from megatron_mtp.megatron.parsing import parsed
from megatron_mtp.model.draft_vocabulary import tokens_of_file
from megatron_mtp.spec.config import SHARED_KEYS
from megatron_mtp.spec.head import trained_depths

TRUNK_ONLY = "trunk only"
"""Entry in the record of an import: the MTP layers were left out, whatever the stored config counts."""


def hf_to_mcore(source: Path, target: Path, options: Options) -> dict[str, Any]:
    """Import the model of a Hugging Face folder as a distributed checkpoint that loads under every parallel layout."""
    return plan_import(source, options).write(target, options)


def plan_import(source: Path, options: Options, trunk_only: bool = False) -> Conversion:
    """Plan `hf-to-mcore`, from names and shapes alone. Raise ValueError if copies in the folder differ.

    With `trunk_only`, the folder's MTP layers are left out, whether complete, incomplete or missing.
    """
    model = HFModel.read(source, trunk_only=trunk_only)
    model.check_numbers()
    args = megatron_arguments(model)

    def keep(folder: Path) -> None:
        keep_hf_files(source, folder / HF_FILES, origin(model) | ({TRUNK_ONLY: True} if trunk_only else {}))
        if not trunk_only:
            carry_record(source, folder)

    return Conversion(
        (source,),
        model.family.title,
        model.layout.depths,
        groups_of(model, options),
        fingerprint_of(model, options),
        lambda folder, _: CheckpointFiles(folder.path, common_of(model, args)),
        keep,
        facts={
            "carried as they are": carried(model.rules),
            "names": moved(map(sides, model.rules)),
        },
        notes=(headless(model) if trunk_only else {}) | notes(model, args),
        tensors=len(model.folder.tensors),
    )


def headless(model: HFModel) -> dict[str, str]:
    """Return the warning for a trunk that is converted without MTP layers, because they are left out or missing."""
    source, lost = model.folder.folder, len(model.left_out)
    if lost:
        return {"warning": f"--trunk-only left out the MTP layers of {source}, {lost} tensors; the trunk alone is here"}
    return {"warning": f"{source} holds no tensor of an MTP layer; the trunk alone is here"}


def notes(model: HFModel, args: Namespace) -> dict[str, Any]:
    """Return facts about the import of a folder that the user should know, by name."""
    reason, beside = getattr(args, "megatron_mtp_untrainable", None), model.folder.side_files
    found: dict[str, Any] = {"also read": ", ".join(beside)} if beside else {}
    found |= model.folder.remarks
    settings = QuantizationSettings.of(model.folder.folder, model.config.keys)
    if settings.needs_weights and not model.folder.quantized:
        found["quantization"] = (
            f"{settings.source} has quant_method '{settings.method}', but no weight is quantized; they are taken as "
            "they are, and the keys are left out"
        )
    if (inner := InnerDrafter.of({}, model.folder.tensors)) is not None:
        found["drafter inside"] = f"{inner.says}, carried as it is, and no MTP layers"
    for (drafts,) in draft_vocabulary(model):
        found["draft vocabulary"] = f"{drafts.entries[0].shape[0]} tokens, those of {DRAFTED}"
    found |= epsilon_note(args)
    depths, held = model.family.depths, model.layout.depths
    if depths is not None and depths.configured(model.config) is None and held < depths.published:
        lost = f"{depths.published - held} of {depths.published}"
        found["MTP layers missing"] = f"{lost} of the published models of this family; no key of the config counts them"
    key, said = counted_elsewhere(model.config.keys)
    if held < said:
        found["MTP layers missing"] = f"{said - held} of {said}, which '{key}' of the config counts"
    return found if reason is None else found | {"trainable here": False, "why not": reason}


def groups_of(model: HFModel, options: Options) -> list[list[Group]]:
    """Return the tensors of a model in parts; the last part is the draft vocabulary, if there is one."""
    parts = [[group_of(model.folder, rule, options) for rule in rules] for rules in parts_of(model.rules).values()]
    return parts + draft_vocabulary(model)


def draft_vocabulary(model: HFModel) -> list[list[Group]]:
    """Return a part with the draft vocabulary from a list in the folder, if the model has a list and MTP layers."""
    file = model.folder.folder / DRAFTED
    if not file.is_file() or not any(piece.key.startswith("mtp.") for rule in model.rules for piece in rule.mcore):
        return []
    tokens_N = torch.tensor(tokens_of_file(file, model.config.integer("vocab_size"), "the draft vocabulary"))
    return [[Group.single(DRAFT_VOCABULARY, tuple(tokens_N.shape), tokens_N.dtype, tokens_N.clone)]]


def group_of(folder: HFFolder, rule: Rule, options: Options) -> Group:
    """Return a rule's tensors, which are read, converted and written together."""
    first = rule.hf[0].name
    shape, dtype = folder.shape(first), options.cast(first, folder.dtype(first))
    entries = [
        Entry(
            (piece.key, *piece.aliases),
            shape if piece.shape is None else piece.shape,
            torch.float32 if piece.wide else dtype,
            piece.whole,
            piece.offset,
        )
        for piece in rule.mcore
    ]
    size = sum(prod(folder.shape(one.name)) * folder.dtype(one.name).itemsize for one in rule.hf)

    def make() -> list[Tensor]:
        given = [(one.name, folder.read(one.name)) for one in rule.hf]
        return rule.to_mcore([tensor.to(options.cast(name, tensor.dtype)) for name, tensor in given])

    return Group(entries, size, make)


def fingerprint_of(model: HFModel, options: Options) -> dict[str, Any]:
    """Return a record that changes when the folder or the options change."""
    files = sorted({stored.file for stored in model.folder.tensors.values()})
    files += [file for file in [model.folder.folder / DRAFTED] if file.is_file()]
    return {
        "source": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "config": read_json(model.folder.folder / CONFIG),
        "dtype": str(options.dtype),
        "layout": layout_record(model.layout),
    }


def common_of(model: HFModel, args: Namespace) -> dict[str, Any]:
    """Return the checkpoint's common state: Megatron's arguments, and the origin of the model."""
    return {"args": args, "checkpoint_version": 3.0, "megatron_mtp": origin(model)}


def origin(model: HFModel) -> dict[str, Any]:
    """Return a record of the model's folder and the conventions of its MTP layers, to store in the checkpoint."""
    depths = model.family.depths
    half = "embedding" if depths is None or depths.embedding_first else "hidden"
    side = "before" if depths is not None and depths.before_norm else "after"
    return {
        "model_type": model.config.model_type,
        "family": model.family.title,
        "layout": layout_record(model.layout),
        "quantised": bool(model.folder.quantized),
        "eh_proj": "embedding half first",
        "eh_proj in the Hugging Face folder": f"{half} half first",
        "input of the first depth": f"trunk's hidden state {side} its final norm",
        "positions": "not shifted: position i keeps its rotary position at every depth",
    }


def layout_record(layout: Layout) -> dict[str, Any]:
    """Return a layout as JSON."""
    return {"depths": layout.depths, "features": sorted(layout.features), "carried": list(layout.carried)}


def keep_hf_files(source: Path, folder: Path, origin: dict[str, Any]) -> None:
    """Copy all files of a Hugging Face folder except weights and quantization, and write the origin next to them."""
    folder.mkdir(exist_ok=True)
    for file in without_weights(source):
        if file.name not in (ORIGIN, RECORD, *SIDE_FILES):
            shutil.copyfile(file, folder / file.name)
    assert (folder / CONFIG).is_file()
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")


def flags_of(model: HFModel) -> tuple[list[str] | None, str | None]:
    """Return Megatron's flags for a model and None, or None and the reason why Megatron cannot run it."""
    if model.family.flags is None:
        return None, model.family.untrainable
    try:
        return model.family.flags(model.config, model.layout), None
    except UntrainableError as reason:
        return None, str(reason)


def megatron_arguments(model: HFModel) -> Namespace:
    """Return the arguments to store in a checkpoint.

    Only `mtp_num_layers` and the reason if Megatron cannot run the model.
    """
    flags, reason = flags_of(model)
    if flags is None:
        return Namespace(mtp_num_layers=model.layout.depths or None, megatron_mtp_untrainable=reason)
    args = parsed(flags, model.config.integer("vocab_size"))
    set_passes(args, model.config)
    return args


UNROLL = "mtp_unroll"
"""Number of passes of the layer in training."""

SHARES, FIRST_PASS = SHARED_KEYS
"""Later passes attended to the keys and values of pass 1; engines call it `INDEX_SHARE` if there is no chain."""


def pass_keys(args: Namespace) -> dict[str, Any]:
    """Return the keys of `config.json` for a checkpoint with these arguments; empty if every MTP layer has one pass."""
    if not getattr(args, "mtp_use_repeated_layer", False) or trained_depths(args) < 2:
        return {}
    keys = {SHARES: SHARES, FIRST_PASS: INDEX_SHARE}
    shares = {key: True for name, key in keys.items() if getattr(args, name, False)}
    return {UNROLL: trained_depths(args), **shares}


def set_passes(args: Namespace, config: HFConfig) -> None:
    """Set Megatron's arguments of an imported folder from the keys of `pass_keys`.

    Raise ValueError for an invalid value.
    """
    if args.mtp_num_layers and config.has(UNROLL):
        args.mtp_use_repeated_layer = True
        args.mtp_unroll = config.integer(UNROLL, least=args.mtp_num_layers)
        args.mtp_repeated_layer_shares_kv = config.flag(SHARES)
        args.mtp_repeated_layer_first_pass_kv = config.flag(INDEX_SHARE)
