"""A Hugging Face folder as a loader sees it: config, index and headers are read, each fault becomes a finding.

Loaders follow the index, and transformers a whole model.safetensors before it. What other files hold is hidden.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mtp.checkpoint.audit.finding import ERROR, NOTE, WARNING, Finding, counted, listed
from megatron_mtp.checkpoint.audit.quantization import check_quantization, merge_quantized
from megatron_mtp.checkpoint.audit.side import DEPTH_KEYS, EMBEDDING, UNFIT, Entry, HFSide
from megatron_mtp.checkpoint.families import Layout, family_of
from megatron_mtp.checkpoint.hf.config import CONFIG, ConfigError, HFConfig, read_json, wrong_kinds
from megatron_mtp.checkpoint.hf.folder import COPY, DTYPES, INDEX, SINGLE, OpenFiles, Stored, is_adapter, stored_in

MTP = re.compile(r"(^|\.|_)mtp(_|\.)")
"""Names of depths' tensors that say so."""
REFETCH = "fetch or export that file again"
REINDEX = "write the index again from the files"
CORRECT = "correct the file, or copy that of the model that this was made from"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
OBJECTS = (GENERATION, TOKENIZER, "special_tokens_map.json", "tokenizer_config.json")
"""Files that hold an object; others may hold a list."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
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
    merge_quantized(side)
    side.findings += check_quantization(side)
    _check_kind(side)
    side.findings += _json_findings(side)
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
    side.findings.append(Finding("damaged index", says, REINDEX, names=(INDEX,)))
    return None


def _visible(side: HFSide, headers: dict[Path, Header], weights: dict[str, str] | None) -> set[Path]:
    """The files that loaders open; of a whole file and an index, transformers opens the file."""
    single, indexed = side.path / SINGLE, {side.path / file for file in (weights or {}).values()}
    if single in headers and (weights is None or single not in indexed):
        return {single}
    return indexed or {file for file in headers if not file.name.startswith(COPY)}


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
    if side.path / SINGLE in headers and SINGLE not in weights.values():
        side.findings.append(_both(side, headers, weights))
        return
    gone: dict[str, list[str]] = defaultdict(list)
    damaged = {name for found in side.findings if found.guess == "damaged file" for name in found.names}
    for name, file in weights.items():
        if file in damaged:
            side.unread.add(name)
        elif name not in headers.get(side.path / file, {}):
            gone[file].append(name)
    where = {name: file.name for file, header in headers.items() for name in header}
    for file, names in gone.items():
        side.findings += _gone(side, file, names, where)
    unlisted = [name for name in side.tensors if name not in weights]
    if unlisted:
        says = f"The index leaves out {counted(len(unlisted), 'tensor')} of its files: {listed(unlisted)}."
        advice = f"{REINDEX}: loaders that follow it do not see these tensors"
        side.findings.append(Finding("tensor not in the index", says, advice, names=tuple(unlisted)))


def _both(side: HFSide, headers: dict[Path, Header], weights: dict[str, str]) -> Finding:
    """A whole model.safetensors beside an index that does not name it."""
    files = sorted(set(weights.values()))
    there = [file for file in files if (side.path / file).is_file()]
    says = (
        f"'{SINGLE}' and an index of other files are both there: transformers opens the first, other loaders the index"
    )
    if not there:
        says += f", whose files ({listed(files)}) are missing."
        return Finding("unindexed file", says, f"remove {INDEX}", WARNING, (INDEX,))
    twice = [name for name in headers[side.path / SINGLE] if name in weights]
    says += f"; {counted(len(twice), 'tensor')} are in both: {listed(twice)}."
    for name, file in list(side.hidden.items()):
        if file in files:
            del side.hidden[name]
    return Finding("duplicate tensor", says, f"remove {SINGLE}, or {INDEX} with its files", WARNING, (INDEX,))


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
        found.append(Finding("tensor in another file", says, REINDEX, names=tuple(moved)))
    if lost:
        says = f"'{file}' lacks {counted(len(lost), 'tensor')} that the index puts there: {listed(lost)}."
        found.append(Finding("tensor missing", says, REFETCH, names=tuple(lost)))
    return found


def _check_hidden(side: HFSide) -> None:
    """Find files that transformers does not open."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in side.hidden.items():
        by_file[file].append(name)
    named = (side.path / INDEX).is_file()
    for file, names in by_file.items():
        if file.startswith(COPY):
            says = f"'{file}' repeats the model in another format, which is not looked at."
            side.findings.append(Finding("unindexed file", says, severity=NOTE, names=(file,)))
            continue
        lost = [name for name in names if name not in side.tensors]
        depths = sum(bool(MTP.search(name)) or side.parts.of(name).kind == "depth" for name in lost)
        of_depths = f", {depths} of them of depths" if depths else ""
        by = "which the index does not list" if named else f"which lies beside '{SINGLE}' without an index"
        says = f"transformers does not open '{file}', {by}: it holds {counted(len(lost), 'tensor')} that no other file "
        says += f"has{of_depths}: {listed(lost)}."
        read = "convert the folder, which reads it (hf-to-mcore) and writes one index (mcore-to-hf)"
        advice = f"name its tensors in {INDEX}, {read}, or remove it" if lost else "remove it"
        side.findings.append(Finding("unindexed file", says, advice, ERROR if lost else WARNING, tuple(lost)))


def _check_kind(side: HFSide) -> None:
    """Say what kind of folder it is, where it is no plain model."""
    if is_adapter(side.path):
        says = f"The folder is an adapter (LoRA), whose tensors are no model: {counted(len(side.tensors), 'tensor')}."
        side.findings = [Finding("not compared", says, "merge it into its base model, and audit the result")]
        side.config, side.family, side.partial = None, None, True
    pickles = sorted(file.name for ending in ("*.bin", "*.pt", "*.pth") for file in side.path.glob(ending))
    if not side.tensors and not side.files and pickles:
        says = f"Its tensors are in pickles, which can run code and are never opened: {listed(pickles)}."
        side.findings.append(Finding("not compared", says, "save the model as safetensors", names=tuple(pickles)))
    links = [path.name for path in sorted(side.path.iterdir()) if path.is_symlink() and not path.exists()]
    if links:
        says = f"{listed(links)} lead nowhere."
        side.findings.append(Finding("file missing", says, "fetch the folder again", names=tuple(links)))


def _json_findings(side: HFSide) -> Iterator[Finding]:
    """What is wrong with the JSON files of a folder; whether config and index can be read is found elsewhere."""
    rows = _rows(side)
    for file in sorted(side.path.glob("*.json")):
        try:
            found = read_json(file)
        except ValueError as error:
            if file.exists() and file.name not in (CONFIG, INDEX):
                yield Finding("damaged file", str(error), CORRECT, names=(file.name,))
            continue
        if file.name in OBJECTS and not isinstance(found, dict):
            says = f"'{file.name}' holds {found!r:.40}; it must be an object."
            yield Finding("damaged file", says, CORRECT, names=(file.name,))
        elif isinstance(found, dict) and file.name in (CONFIG, GENERATION):
            for name, says in wrong_kinds(found):
                yield Finding("damaged config", f"{file.name}: {says}.", CORRECT, names=(name,))
        if isinstance(found, dict) and rows is not None:
            yield from _tokens(file.name, found, rows)
        twice = repeated_names(file)
        if twice:
            says = f"'{file.name}' has {listed(twice)} more than once: which one is read depends on the reader."
            yield Finding("damaged config", says, "remove the wrong ones", WARNING, tuple(twice))


def repeated_names(file: Path) -> list[str]:
    """Names that an object of a JSON file has more than once."""
    found: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        found.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=note)
    return found


def _rows(side: HFSide) -> int | None:
    """The rows of the embedding; None without one."""
    shapes = (entry.shape for name, entry in side.tensors.items() if side.parts.of(name).kind == EMBEDDING)
    return next((shape[0] for shape in shapes if shape), None)


def _tokens(file: str, found: dict[str, Any], rows: int) -> Iterator[Finding]:
    """Tokens without a row of the embedding, in the tokenizer or named by a config."""
    if file == TOKENIZER:
        vocabulary = found.get("model", {}).get("vocab") if isinstance(found.get("model"), dict) else None
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        added = [one for one in found.get("added_tokens") or () if isinstance(one, dict)]
        ids |= {str(one.get("content")): one.get("id") for one in added}
    elif file in (CONFIG, GENERATION):
        text = found.get("text_config")
        keys = {**found, **(text if isinstance(text, dict) else {})}
        values = {key: keys[key] if isinstance(keys[key], list) else [keys[key]] for key in TOKENS if key in keys}
        ids = {key: max((n for n in each if _is_id(n)), default=None) for key, each in values.items()}
    else:
        return
    beyond = {name: number for name, number in ids.items() if _is_id(number) and number >= rows}
    if beyond:
        first, number = next(iter(beyond.items()))
        more = f" and {len(beyond) - 1} more are" if len(beyond) > 1 else " is"
        says = f"{file}: '{first}' ({number}){more} beyond the embedding, whose tokens are 0 to {rows - 1}."
        advice = "resize the embedding to the tokenizer, or take the tokenizer that the model was trained with"
        yield Finding("tokenizer", says, advice, names=tuple(beyond))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_values(side: HFSide) -> None:
    """Read the config as the family does: what it cannot use is damaged; what it does not know may be sound."""
    if side.family is None or side.config is None or any(found.guess == "damaged config" for found in side.findings):
        return
    family, config = side.family, side.config
    depths = 0 if family.depths is None else family.depths.stored(side.tensors)
    layout = side.layout(depths) or Layout(depths)
    flags = family.flags
    reads: list[Callable[[], object]] = [lambda: config.rope, lambda: family.rules(config, layout)]
    reads += [] if flags is None else [lambda: flags(config, layout)]
    for read in reads:
        try:
            read()
        except ConfigError as error:
            says = f"The config cannot be used: {error}"
            side.findings.append(Finding("damaged config", says, "correct the config", names=(CONFIG,)))
            return
        except UNFIT:
            continue
