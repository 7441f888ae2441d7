"""Open a Hugging Face folder as the conversion reads it; each fault of config, files and lists becomes a finding."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mtp.checkpoint.audit import NOTE, WARNING, counted, listed
from megatron_mtp.checkpoint.audit.quantization import check_parts, check_quantization, scale_fault
from megatron_mtp.checkpoint.audit.side import (
    DEPTH,
    DEPTH_KEYS,
    EMBEDDING,
    UNFIT,
    UNREADABLE,
    DrafterSide,
    HFSide,
    StoredTensor,
)
from megatron_mtp.checkpoint.families import Layout, family_of
from megatron_mtp.checkpoint.families.described import described
from megatron_mtp.checkpoint.hf.config import (
    CONFIG,
    ConfigError,
    HFConfig,
    are_words,
    contradictions,
    read_json,
    rope_said_twice,
    text_key,
    wrong_kinds,
)
from megatron_mtp.checkpoint.hf.folder import DTYPES, INDEX, Faults, HFFolder, check_form, drafter_kind
from megatron_mtp.checkpoint.hf.forms.form import MisfitError

REFETCH = "fetch or export that file again"
CORRECT = "correct the file, or copy that of the model that this was made from"
GENERATION = "generation_config.json"
OBJECTS = (GENERATION, "tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")
"""Files that contain a JSON object; others may contain a list."""


def open_folder(path: Path) -> HFSide:
    """Open a folder."""
    side = HFSide(path) if drafter_kind(path) is None else DrafterSide(path)
    _read_config(side)
    _read_tensors(side)
    if isinstance(side, DrafterSide):
        _read_drafter(side)
    _check_files(side)
    _check_tokens(side)
    _check_values(side)
    return side


def _read_config(side: HFSide) -> None:
    try:
        keys = read_json(side.path / CONFIG)
        unnamed = isinstance(keys, dict) and keys.get("model_type") is None and are_words(keys.get("architectures"))
        side.config = HFConfig.from_keys({**keys, "model_type": ""} if unnamed else keys, CONFIG)
    except ValueError as error:
        advice = f"copy the {CONFIG} of the model that this was made from"
        side.add("damaged config", f"The config cannot be read: {error}", advice, names=[CONFIG])
        return
    side.keys = keys
    odd = [name for name in (*DEPTH_KEYS, "num_hidden_layers") if side.config.has(name) and side.counts(name) is None]
    if odd:
        says = f"{listed(odd)} of the config: no number of layers or MTP layers ({side.config.keys[odd[0]]!r:.40})."
        side.add("damaged config", says, "correct the config", names=odd)
    if isinstance(side, DrafterSide):
        return
    try:
        side.family = family_of(side.config)
        side.config = side.family.complete(side.config)
    except ValueError:
        side.described = described(side.config.model_type, side.config.text_type)
        named = f"The model_type '{side.config.model_type:.60}' is unknown here"
        if unnamed:
            named = f"The config has no model_type (architectures {', '.join(keys['architectures']):.100})"
        if side.described is not None:
            named = f"{side.described.title} does not convert ({side.described.reason})"
        side.add("not compared", f"{named}: tensors are described by their names.", severity=NOTE)


def _read_tensors(side: HFSide) -> None:
    """List the tensors, unless the folder's reader refuses it, and check files that loaders do not open.

    A tensor or a file that cannot be read is a finding, and the rest is listed.
    """
    faults: Faults = []
    try:
        check_form(side.path)
        side.folder = folder = HFFolder(side.path, side.quantization.numbers, side.tied, faults)
    except ValueError as error:
        side.add("damaged file", str(error), REFETCH)
        return
    for wrong, lost in faults:
        side.add("quantization" if isinstance(wrong, MisfitError) else "damaged file", str(wrong), REFETCH)
        side.unread |= set(lost)
    side.tensors = {name: _entry(side, folder, name) for name in folder.tensors}
    for what, says in folder.remarks.items():
        side.add(what, says, severity=NOTE)
    for file in folder.side_files:
        lost = [name for name, one in folder.tensors.items() if one.file.name == file and name not in side.unread]
        if not lost:  # the index lists no tensor of this file
            continue
        depths = sum(side.parts.of(name).kind == DEPTH for name in lost)
        says = f"transformers does not open '{file}', which no index lists: it holds {counted(len(lost), 'tensor')}"
        says += f"{f', {depths} of them of MTP layers' if depths else ''}: {listed(lost)}."
        read = "convert the folder, which reads it (hf-to-mcore) and writes one index (mcore-to-hf)"
        side.add("unindexed file", says, f"name its tensors in {INDEX}, or {read}", names=lost)
    check_parts(side)
    side.findings += check_quantization(side)


def _entry(side: HFSide, folder: HFFolder, name: str) -> StoredTensor:
    if (weight := folder.quantized.get(name)) is None:
        if (kind := folder.tensors[name].kind) not in DTYPES:
            return StoredTensor(folder.shape(name), kind, folder.bytes_of(name), None)
        dtype = str(folder.dtype(name)).removeprefix("torch.")
        read, pieces = partial(folder.read, name), partial(folder.pieces, name)
        return StoredTensor(folder.shape(name), dtype, folder.bytes_of(name), read, pieces)

    def decoded() -> Tensor:
        parts = folder.parts_of(name)
        if fault := scale_fault(weight, parts):
            side.scales[name] = fault
        return weight.decode(parts)

    raw = weight.fault and weight.shape is not None  # if it fits no form, report the stored type instead
    dtype = str(folder.tensors[name].dtype).removeprefix("torch.") if raw else weight.form.name
    return StoredTensor(weight.shape, dtype, folder.bytes_of(name), decoded if weight.is_read else None)


def _read_drafter(side: DrafterSide) -> None:
    """Find the form of a drafter's folder, and the order of its drafts."""
    from megatron_mtp.checkpoint.convert.drafter_form import form_in, in_order, trunk_of

    try:
        side.drafter = form = form_in(side.path, trunk_of(side.path), side.tensors)
    except UNFIT as error:
        side.add("damaged config", f"The config cannot be used: {error}", CORRECT, names=[CONFIG])
        return
    shapes = {one.name: one.shape for rule in form.rules() for one in rule.hf}
    lists = [name for name in form.lists if name in side.tensors and side.tensors[name].shape == shapes[name]]
    if len(lists) < len(form.lists):
        return  # the form is recognized by names and shapes, without the lists
    try:
        side.drafter = in_order(form, {name: side.read(name) for name in lists})
    except UNREADABLE as error:
        side.add("draft vocabulary", f"The drafted tokens are not known: {error}.", REFETCH, names=lists)


def _check_files(side: HFSide) -> None:
    """Check the JSON files of a folder, except whether its config and index can be read."""
    for file in sorted(side.path.glob("*.json")):
        try:
            found = read_json(file)
        except ValueError as error:
            if file.exists() and file.name not in (CONFIG, INDEX):
                side.add("damaged file", str(error), CORRECT, names=[file.name])
            continue
        if file.name in OBJECTS and not isinstance(found, dict):
            says = f"'{file.name}' holds {found!r:.40}; it must be an object."
            side.add("damaged file", says, CORRECT, names=[file.name])
        elif isinstance(found, dict) and file.name in (CONFIG, GENERATION):
            for name, says in (*wrong_kinds(found), *contradictions(_text_keys(found)), *rope_said_twice(found)):
                side.add("damaged config", f"{file.name}: {says}.", CORRECT, names=[name])


def _text_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a file, including those of its text model."""
    return {**keys, **keys.get(text_key(keys) or "", {})}


def _check_tokens(side: HFSide) -> None:
    """Find token ids in configs and the tokenizer for which the embedding has no row."""
    embeddings = (entry for name, entry in side.tensors.items() if side.parts.of(name).kind == EMBEDDING)
    rows = next((entry.shape[0] for entry in embeddings if entry.shape), None)
    if rows is None:
        return
    for file in (CONFIG, GENERATION):
        for name, value in _text_keys(_object_in(side.path / file)).items():
            if not _TOKEN.search(name) or _SEEN.search(name):
                continue
            ids = value if isinstance(value, list) else [value]
            if over := [one for one in ids if isinstance(one, int) and one >= rows]:
                says = f"{file}: '{name}' is {over[0]}, but the embedding has {rows} rows, so no text has this token "
                side.add("token id", f"{says}or the lookup fails.", "take the file of the release", names=[name])
    tokens: dict[str, int] = {}
    for file, read in TOKENIZERS.items():
        with suppress(*UNFIT):
            tokens |= read(_object_in(side.path / file))
    side.words = {one: text for text, one in _words_in(side.path).items()}
    lost = [f"{text} ({one})" for text, one in tokens.items() if one >= rows and not _SEEN.search(text)]
    if lost:
        says = f"The tokenizer has {counted(len(lost), 'token')} for which the embedding of {rows} rows has none: "
        advice = "take the tokenizer of the release, or give the embedding rows for them"
        side.add("token id", f"{says}{listed(lost)}. Inputs with them fail.", advice, WARNING, lost)


def _object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without one."""
    with suppress(ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


def _words_in(folder: Path) -> dict[str, int]:
    """Return the text tokens of a vocabulary, with their ids."""
    with suppress(*UNFIT):
        library = _object_in(folder / "tokenizer.json")
        added = {one["content"] for one in library.get("added_tokens", ())}
        vocabulary = _of_library(library) if library else _object_in(folder / "vocab.json")
        return {text: one for text, one in vocabulary.items() if text not in added and not _UNUSED.search(text)}
    return {}


def _of_library(keys: dict[str, Any]) -> dict[str, int]:
    """Return the tokens of a `tokenizer.json`, with their ids."""
    vocabulary = keys.get("model", {}).get("vocab", {})
    listed = (
        {text: index for index, (text, *_) in enumerate(vocabulary)} if isinstance(vocabulary, list) else vocabulary
    )
    return {**listed, **{one["content"]: one["id"] for one in keys.get("added_tokens", ())}}


TOKENIZERS: dict[str, Callable[[dict[str, Any]], dict[str, int]]] = {
    "vocab.json": lambda keys: keys,
    "tokenizer.json": _of_library,
    "added_tokens.json": lambda keys: keys,
    "tokenizer_config.json": lambda keys: {
        one["content"]: int(index) for index, one in keys.get("added_tokens_decoder", {}).items()
    },
}
"""Files of tokenizers, and where their tokens and ids are."""
_TOKEN = re.compile(r"(^|_)token_ids?$")
_UNUSED = re.compile(r"unused|reserved|special|control|extra|placeholder|^<.*>$|^\[.*\]$|pad\b", re.IGNORECASE)
"""Tokens that no text needs to have."""
_SEEN = re.compile(r"image|video|vision|visual|audio|speech", re.IGNORECASE)
"""Tokens whose places images and sounds take, so that they need no row."""


def _check_values(side: HFSide) -> None:
    """Read the config as the family does. Values that it cannot use are damaged; unknown values may be sound."""
    family, config = side.family, side.config
    if family is None or config is None or any(found.guess == "damaged config" for found in side.findings):
        return
    depths = 0 if family.depths is None else family.depths.stored(side.tensors)
    layout = side.layout(depths) or Layout(depths)
    reads: list[Callable[[], object]] = [lambda: config.rope, partial(family.rules, config, layout)]
    reads += [] if family.flags is None else [partial(family.flags, config, layout)]
    for read in reads:
        try:
            read()
        except ConfigError as error:
            side.add("damaged config", f"The config cannot be used: {error}", "correct the config", names=[CONFIG])
            return
        except UNFIT:
            continue
