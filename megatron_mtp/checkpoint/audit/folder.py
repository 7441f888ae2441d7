"""A Hugging Face folder as a loader sees it: config, index and headers are read, each fault becomes a finding.

Loaders follow the index, and transformers a whole model.safetensors before it. What other files hold is hidden.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_mtp.checkpoint.audit import ERROR, NOTE, WARNING, counted, listed
from megatron_mtp.checkpoint.audit.quantization import check_quantization, merge_quantized
from megatron_mtp.checkpoint.audit.side import DEPTH, DEPTH_KEYS, UNFIT, DrafterSide, HFSide, StoredTensor
from megatron_mtp.checkpoint.families import Layout, family_of
from megatron_mtp.checkpoint.hf.config import CONFIG, ConfigError, HFConfig, read_json, wrong_kinds
from megatron_mtp.checkpoint.hf.folder import (
    COPY,
    DTYPES,
    INDEX,
    SINGLE,
    OpenFiles,
    Stored,
    drafter_kind,
    is_adapter,
    stored_in,
)

MTP = re.compile(r"(^|\.|_)mtp(_|\.)")
"""Names of depths' tensors that say so."""
REFETCH = "fetch or export that file again"
REINDEX = "write the index again from the files"
CORRECT = "correct the file, or copy that of the model that this was made from"
GENERATION = "generation_config.json"
OBJECTS = (GENERATION, "tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")
"""Files that hold an object; others may hold a list."""
Headers = dict[str, dict[str, Stored]]
"""The tensors in each file, by the file's name."""


def open_folder(path: Path) -> HFSide:
    """Open a folder."""
    side = HFSide(path) if drafter_kind(path) is None else DrafterSide(path)
    _read_config(side)
    headers, damaged = _headers(side)
    side.files = list(headers)
    weights = _weight_map(side)
    visible, opened, where = _visible(headers, weights), OpenFiles(), dict[str, str]()
    for file, header in headers.items():
        for name, stored in header.items():
            if file not in visible:
                side.hidden[name] = file
            elif name in where:
                says = f"'{name}' is in '{where[name]}' and in '{file}': which of the two is loaded depends on the "
                side.add("duplicate tensor", f"{says}loader.", "remove the file that does not belong", names=[name])
            else:
                side.tensors[name], where[name] = _entry(name, stored, opened), file
    if weights is None:
        side.partial = bool(damaged)
    elif SINGLE in headers and SINGLE not in weights.values():
        _both(side, headers, weights)
    else:
        _check_index(side, headers, weights, damaged)
    _check_hidden(side)
    merge_quantized(side)
    side.findings += check_quantization(side)
    if isinstance(side, DrafterSide):
        _read_drafter(side)
    _check_kind(side)
    _check_files(side)
    _check_values(side)
    return side


def _read_config(side: HFSide) -> None:
    try:
        keys = read_json(side.path / CONFIG)
        side.config = HFConfig.from_keys(keys, CONFIG)
    except ValueError as error:
        advice = f"copy the {CONFIG} of the model that this was made from"
        side.add("damaged config", f"The config cannot be read: {error}", advice, names=[CONFIG])
        return
    side.keys = keys
    odd = [name for name in (*DEPTH_KEYS, "num_hidden_layers") if side.config.has(name) and side.counts(name) is None]
    if odd:
        says = f"{listed(odd)} of the config: no number of layers or depths ({side.config.keys[odd[0]]!r:.40})."
        side.add("damaged config", says, "correct the config", names=odd)
    if isinstance(side, DrafterSide):
        return
    try:
        side.family = family_of(side.config)
        side.config = side.family.complete(side.config)
    except ValueError:
        says = f"The model_type '{side.config.model_type:.60}' is unknown here: tensors are described by their names."
        side.add("not compared", says, severity=NOTE)


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
        return  # which is found by names and shapes
    try:
        side.drafter = in_order(form, {name: side.tensors[name].tensor() for name in lists})
    except (ValueError, OSError, RuntimeError) as error:
        side.add("draft vocabulary", f"The drafted tokens are not known: {error}.", REFETCH, names=lists)


def _headers(side: HFSide) -> tuple[Headers, list[str]]:
    """The header of every file of tensors, and the files that cannot be read."""
    headers: Headers = {}
    damaged = []
    for file in sorted(side.path.glob("*.safetensors")):
        try:
            headers[file.name] = stored_in(file)
        except ValueError as error:
            says = f"No tensor of '{file.name}' can be read: {error}"
            side.add("damaged file", says, REFETCH, names=[file.name])
            damaged.append(file.name)
    return headers, damaged


def _weight_map(side: HFSide) -> dict[str, str] | None:
    """The index; None without one that can be read."""
    if not (side.path / INDEX).is_file():
        return None
    try:
        index = read_json(side.path / INDEX)
    except ValueError:
        index = None
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if isinstance(weights, dict) and all(isinstance(file, str) for file in weights.values()):
        return weights
    says = f"'{INDEX}' is damaged: it has no 'weight_map' from tensors to files, so no loader finds them."
    side.add("damaged index", says, REINDEX, names=[INDEX])
    return None


def _visible(headers: Headers, weights: dict[str, str] | None) -> set[str]:
    """The files that loaders open; of a whole file and an index, transformers opens the file."""
    indexed = set((weights or {}).values())
    if SINGLE in headers and SINGLE not in indexed:
        return {SINGLE}
    return indexed or {file for file in headers if not file.startswith(COPY)}


def _entry(name: str, stored: Stored, opened: OpenFiles) -> StoredTensor:
    def read() -> Tensor:
        tensor: Tensor = opened.file(stored.file).get_tensor(name)
        return tensor

    known = stored.kind in DTYPES
    dtype = str(stored.dtype).removeprefix("torch.") if known else stored.kind
    return StoredTensor(stored.shape, dtype, stored.bytes if known else 0, read)


def _both(side: HFSide, headers: Headers, weights: dict[str, str]) -> None:
    """Describe a whole model.safetensors beside an index that does not name it."""
    files = sorted(set(weights.values()))
    says = f"'{SINGLE}' and an index of other files are both there: transformers opens the first, other loaders the "
    if not any((side.path / file).is_file() for file in files):
        says += f"index, whose files ({listed(files)}) are missing."
        side.add("unindexed file", says, f"remove {INDEX}", WARNING, [INDEX])
        return
    twice = [name for name in headers[SINGLE] if name in weights]
    says += f"index; {counted(len(twice), 'tensor')} are in both: {listed(twice)}."
    side.hidden = {name: file for name, file in side.hidden.items() if file not in files}
    side.add("duplicate tensor", says, f"remove {SINGLE}, or {INDEX} with its files", WARNING, [INDEX])


def _check_index(side: HFSide, headers: Headers, weights: dict[str, str], damaged: list[str]) -> None:
    """Compare the index with the files."""
    gone: dict[str, list[str]] = defaultdict(list)
    for name, file in weights.items():
        if file in damaged:
            side.unread.add(name)
        elif name not in headers.get(file, {}):
            gone[file].append(name)
    where = {name: file for file, header in headers.items() for name in header}
    for file, names in gone.items():
        if not (side.path / file).is_file():
            says = f"'{file}' is not there, in which the index puts {counted(len(names), 'tensor')}: {listed(names)}."
            side.unread |= set(names)
            side.add("file missing", says, REFETCH, names=names)
            continue
        if moved := [name for name in names if name in where]:
            says = f"The index puts {listed(moved)} into '{file}', but they are in '{where[moved[0]]}'."
            side.add("tensor in another file", says, REINDEX, names=moved)
        if lost := [name for name in names if name not in where]:
            says = f"'{file}' lacks {counted(len(lost), 'tensor')} that the index puts there: {listed(lost)}."
            side.add("tensor missing", says, REFETCH, names=lost)
    if unlisted := [name for name in side.tensors if name not in weights]:
        says = f"The index leaves out {counted(len(unlisted), 'tensor')} of its files: {listed(unlisted)}."
        advice = f"{REINDEX}: loaders that follow it do not see these tensors"
        side.add("tensor not in the index", says, advice, names=unlisted)


def _check_hidden(side: HFSide) -> None:
    """Find files that transformers does not open."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in side.hidden.items():
        by_file[file].append(name)
    named = (side.path / INDEX).is_file()
    for file, names in by_file.items():
        if file.startswith(COPY):
            says = f"'{file}' repeats the model in another format, which is not looked at."
            side.add("unindexed file", says, severity=NOTE, names=[file])
            continue
        lost = [name for name in names if name not in side.tensors]
        depths = sum(bool(MTP.search(name)) or side.parts.of(name).kind == DEPTH for name in lost)
        of_depths = f", {depths} of them of depths" if depths else ""
        by = "which the index does not list" if named else f"which lies beside '{SINGLE}' without an index"
        says = f"transformers does not open '{file}', {by}: it holds {counted(len(lost), 'tensor')} that no other file "
        says += f"has{of_depths}: {listed(lost)}."
        read = "convert the folder, which reads it (hf-to-mcore) and writes one index (mcore-to-hf)"
        advice = f"name its tensors in {INDEX}, {read}, or remove it" if lost else "remove it"
        side.add("unindexed file", says, advice, ERROR if lost else WARNING, lost)


def _check_kind(side: HFSide) -> None:
    """Say what kind of folder it is, where it is no plain model."""
    if is_adapter(side.path):
        says = f"The folder is an adapter (LoRA), whose tensors are no model: {counted(len(side.tensors), 'tensor')}."
        side.config, side.family, side.partial, side.findings = None, None, True, []
        side.add("not compared", says, "merge it into its base model, and audit the result")
    pickles = sorted(file.name for ending in ("*.bin", "*.pt", "*.pth") for file in side.path.glob(ending))
    if not side.tensors and not side.files and pickles:
        says = f"Its tensors are in pickles, which can run code and are never opened: {listed(pickles)}."
        side.add("not compared", says, "save the model as safetensors", names=pickles)
    links = [path.name for path in sorted(side.path.iterdir()) if path.is_symlink() and not path.exists()]
    if links:
        side.add("file missing", f"{listed(links)} lead nowhere.", "fetch the folder again", names=links)


def _check_files(side: HFSide) -> None:
    """Look at the JSON files of a folder; whether config and index can be read is found elsewhere."""
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
            for name, says in wrong_kinds(found):
                side.add("damaged config", f"{file.name}: {says}.", CORRECT, names=[name])


def _check_values(side: HFSide) -> None:
    """Read the config as the family does: what it cannot use is damaged; what it does not know may be sound."""
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
