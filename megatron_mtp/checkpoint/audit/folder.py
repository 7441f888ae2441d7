"""A Hugging Face folder as a loader sees it: config, index and headers are read, each fault becomes a finding.

Loaders follow the index. What the files hold beside it is not loaded, and is listed as hidden.
"""

import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_mtp.checkpoint.audit.entry import Entry
from megatron_mtp.checkpoint.audit.finding import NOTE, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.json_files import json_findings
from megatron_mtp.checkpoint.audit.side import DEPTH_KEYS, MXFP4, UNFIT, HFSide
from megatron_mtp.checkpoint.families import Family, Layout, family_of
from megatron_mtp.checkpoint.hf.config import CONFIG, ConfigError, HFConfig, read_json
from megatron_mtp.checkpoint.hf.folder import ADAPTER, COPY, DTYPES, INDEX, SINGLE, OpenFiles, Stored, stored_in
from megatron_mtp.checkpoint.hf.quantized import Quantized, block_of, quantization, quantized_weights

MTP = re.compile(r"(^|\.|_)mtp(_|\.)")
"""Names of depths' tensors that say so."""
REFETCH = "fetch or export that file again"
Header = dict[str, Stored]


def open_folder(path: Path) -> HFSide:
    """Open a folder."""
    side = HFSide(path)
    _read_config(side)
    headers = _headers(side)
    side.files = [file.name for file in headers]
    weights = _weight_map(side)
    visible, opened, where = _visible(side, headers, weights), OpenFiles(), dict[str, Path]()
    for file, header in headers.items():
        for name, value in header.items():
            if file not in visible:
                side.hidden[name] = file.name
            elif name in side.tensors:
                side.findings.append(_twice(name, where[name], file))
            else:
                side.tensors[name], where[name] = _entry(name, value, opened), file
    _check_index(side, headers, weights)
    _check_hidden(side)
    _with_scales(side)
    _check_kind(side)
    side.findings += json_findings(path)
    _check_values(side)
    return side


def _read_config(side: HFSide) -> None:
    try:
        keys = read_json(side.path / CONFIG)
        side.config = HFConfig.from_keys(keys, CONFIG)
    except ValueError as error:
        advice = f"copy the {CONFIG} of the model that this was made from"
        side.findings.append(Finding("damaged config", f"The config cannot be read: {error}", advice, names=(CONFIG,)))
        return
    side.keys = keys
    odd = [name for name in (*DEPTH_KEYS, "num_hidden_layers") if side.config.has(name) and side.counts(name) is None]
    if odd:
        says = f"{listed(odd)} of the config: no number of layers or depths ({side.config.keys[odd[0]]!r:.40})."
        side.findings.append(Finding("damaged config", says, "correct the config", names=tuple(odd)))
    try:
        side.family = family_of(side.config)
        side.config = side.family.complete(side.config)
    except ValueError:
        says = f"The model_type '{side.config.model_type:.60}' is unknown here: tensors are described by their names."
        side.findings.append(Finding("not compared", says, severity=NOTE))


def _headers(side: HFSide) -> dict[Path, Header]:
    """The header of every file of tensors that can be read."""
    headers: dict[Path, Header] = {}
    for file in sorted(side.path.glob("*.safetensors")):
        try:
            headers[file] = stored_in(file)
        except ValueError as error:
            says = f"No tensor of '{file.name}' can be read: {error}"
            side.findings.append(Finding("damaged file", says, REFETCH, names=(file.name,)))
    return headers


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
    side.findings.append(Finding("damaged index", says, "write the index again from the files", names=(INDEX,)))
    return None


def _visible(side: HFSide, headers: dict[Path, Header], weights: dict[str, str] | None) -> set[Path]:
    """The files that loaders open."""
    if weights is not None:
        return {side.path / file for file in weights.values()}
    if side.path / SINGLE in headers:
        return {side.path / SINGLE}
    return {file for file in headers if not file.name.startswith(COPY)}


def _entry(name: str, stored: Stored, opened: OpenFiles) -> Entry:
    known = stored.kind in DTYPES
    dtype = str(stored.dtype).removeprefix("torch.") if known else stored.kind
    return Entry(stored.shape, dtype, stored.bytes if known else 0, partial(_read, opened, stored.file, name))


def _read(opened: OpenFiles, file: Path, name: str) -> Tensor:
    tensor: Tensor = opened.file(file).get_tensor(name)
    return tensor


def _twice(name: str, first: Path, file: Path) -> Finding:
    says = f"'{name}' is in '{first.name}' and in '{file.name}': which of the two is loaded depends on the loader."
    return Finding("duplicate tensor", says, "remove the file that does not belong", names=(name,))


def _check_index(side: HFSide, headers: dict[Path, Header], weights: dict[str, str] | None) -> None:
    """Compare the index with the files."""
    if weights is None:
        side.partial = any(found.guess == "damaged file" for found in side.findings)
        return
    where = {name: file.name for file, header in headers.items() for name in header}
    gone: dict[str, list[str]] = defaultdict(list)
    damaged = {name for found in side.findings if found.guess == "damaged file" for name in found.names}
    for name, file in weights.items():
        if file in damaged:
            side.unread.add(name)
        elif where.get(name) != file:
            gone[file].append(name)
    for file, names in gone.items():
        side.findings += _gone(side, file, names, where)
    unlisted = [name for name in side.tensors if name not in weights]
    if unlisted:
        says = f"The index leaves out {counted(len(unlisted), 'tensor')} of its files: {listed(unlisted)}."
        advice = "write the index again from the files: loaders that follow it do not see these tensors"
        side.findings.append(Finding("tensor not in the index", says, advice, names=tuple(unlisted)))


def _gone(side: HFSide, file: str, names: list[str], where: dict[str, str]) -> list[Finding]:
    """What is wrong with tensors that the index puts into a file which lacks them."""
    if not (side.path / file).is_file():
        says = f"'{file}' is not there, in which the index puts {counted(len(names), 'tensor')}: {listed(names)}."
        side.unread |= set(names)
        return [Finding("file missing", says, REFETCH, names=tuple(names))]
    moved = [name for name in names if name in where]
    lost = [name for name in names if name not in where]
    found = []
    if moved:
        says = f"The index puts {listed(moved)} into '{file}', but they are in '{where[moved[0]]}'."
        advice = "write the index again from the files"
        found.append(Finding("tensor in another file", says, advice, names=tuple(moved)))
    if lost:
        says = f"'{file}' lacks {counted(len(lost), 'tensor')} that the index puts there: {listed(lost)}."
        found.append(Finding("tensor missing", says, REFETCH, names=tuple(lost)))
    return found


def _check_hidden(side: HFSide) -> None:
    """Find files that no loader opens."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in side.hidden.items():
        by_file[file].append(name)
    for file, names in by_file.items():
        lost = [name for name in names if name not in side.tensors]
        if file.startswith(COPY):
            says = f"'{file}' repeats the model in another format, which is not looked at."
            side.findings.append(Finding("unindexed file", says, severity=NOTE, names=(file,)))
            continue
        depths = sum(bool(MTP.search(name)) for name in lost)
        of_depths = f", {depths} of them of depths" if depths else ""
        says = f"No loader opens '{file}', which the index does not list: it holds {counted(len(lost), 'tensor')} that "
        says += f"no other file has{of_depths}: {listed(lost)}."
        advice = f"name its tensors in {INDEX}, or remove it"
        severity = "error" if lost else WARNING
        side.findings.append(Finding("unindexed file", says, advice, severity, tuple(lost)))


def _with_scales(side: HFSide) -> None:
    """Read quantized weights with their scales, as the conversion does; the two tensors of MXFP4 become one."""
    stored = {name: (entry.shape, entry.kind) for name, entry in side.tensors.items()}
    weights = quantized_weights(stored, block_of(side.keys))
    for name, says in weights.wrong.items():
        advice = "restore the weight with its scale, or remove what does not belong"
        side.findings.append(Finding("quantization", f"'{name}' {says}.", advice, names=(name,)))
    for name, weight in weights.found.items():
        parts = [side.tensors[part] for part in weight.parts]
        read = partial(_decoded, weight, parts)
        if name in weight.parts:
            side.tensors[name] = replace(parts[0], read=read)
            continue
        for part in weight.parts:
            del side.tensors[part]
        side.tensors[name] = Entry(weight.shape, MXFP4, sum(part.bytes for part in parts), read)


def _decoded(weight: Quantized, parts: list[Entry]) -> Tensor:
    return weight.decode(*(part.read() for part in parts))


def _check_kind(side: HFSide) -> None:
    """Say what kind of folder it is, where it is no plain model."""
    if (side.path / ADAPTER).is_file() and side.config is None:
        says = f"The folder is an adapter (LoRA), whose tensors are no model: {counted(len(side.tensors), 'tensor')}."
        advice = "merge it into its base model, and audit the result"
        side.findings = [found for found in side.findings if found.guess != "damaged config"]
        side.findings.append(Finding("not compared", says, advice, names=(ADAPTER,)))
    method = quantization(side.path, side.keys)
    if method is not None:
        says = f"The folder is quantized: quant_method '{method}'."
        side.findings.append(Finding("quantization", says, severity=NOTE))
    pickles = sorted(file.name for ending in ("*.bin", "*.pt", "*.pth") for file in side.path.glob(ending))
    if not side.tensors and not side.files and pickles:
        says = f"Its tensors are in pickles, which can run code and are never opened: {listed(pickles)}."
        side.findings.append(Finding("not compared", says, "save the model as safetensors", names=tuple(pickles)))
    links = [path.name for path in sorted(side.path.iterdir()) if path.is_symlink() and not path.exists()]
    if links:
        says = f"{listed(links)} lead nowhere."
        side.findings.append(Finding("file missing", says, "fetch the folder again", names=tuple(links)))


def _check_values(side: HFSide) -> None:
    """Read the config as the family does: what it cannot use is damaged; what it does not know may be sound."""
    if side.family is None or side.config is None or any(found.guess == "damaged config" for found in side.findings):
        return
    family, config = side.family, side.config
    depths = 0 if family.depths is None else family.depths.stored(side.tensors)
    layout = side.layout(depths) or Layout(depths)
    for read in (lambda: config.rope, lambda: family.rules(config, layout), lambda: _flags(family, config, layout)):
        try:
            read()
        except ConfigError as error:
            says = f"The config cannot be used: {error}"
            side.findings.append(Finding("damaged config", says, "correct the config", names=(CONFIG,)))
            return
        except UNFIT:
            continue


def _flags(family: Family, config: HFConfig, layout: Layout) -> list[str]:
    return [] if family.flags is None else family.flags(config, layout)
