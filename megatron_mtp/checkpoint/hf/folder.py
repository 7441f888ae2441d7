"""Hugging Face folders of safetensors: recognize a model's folder, and read its tensors one by one.

Names, shapes and dtypes come from the safetensors library. Pickles are rejected and never opened. Quantized weights are
decoded as they are read (quantized.py), and listed without their scales. Folders that do not convert (adapters, GGUF,
other quantizations, wrappers, broken links) are rejected with a message that names their kind.
"""

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.config import CONFIG, check_file, read_json
from megatron_mtp.checkpoint.hf.forms.form import E8M0, MisfitError, Numbers
from megatron_mtp.checkpoint.hf.quantized import (
    QuantizationSettings,
    activation_scales,
    quantized_weights,
    readable_methods,
)
from megatron_mtp.spec.kinds import DRAFTERS

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNLIKE_MODELS = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
"""Tensors of a drafter, but not of a model, whose config names the architecture of whole models."""
COPY = "consolidated"
"""Prefix of files that repeat the model in another format (Mistral's); ignored."""
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors headers."""
PIECE = 2**24
"""Bytes of a piece, small enough for the processor's caches."""
KINDS = {dtype: name for name, dtype in DTYPES.items()}
ADAPTER = "adapter_config.json"
BUFFERS = re.compile(r"(^|\.)rotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers that older saves store with the weights. The config implies them, so transformers and vLLM skip them."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `kind` is the name of its type in safetensors: "BF16"."""

    file: Path
    shape: Shape
    kind: str

    @property
    def dtype(self) -> torch.dtype:
        """The type; KeyError for one that is not known here."""
        return DTYPES[self.kind]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        if self.kind in DTYPES:
            return prod(self.shape) * self.dtype.itemsize
        bits = re.search(r"\d+", self.kind)  # the 6 of F6_E2M3
        return prod(self.shape) * (int(bits[0]) if bits else 0) // 8


Faults = list[tuple[ValueError, list[str]]]
"""What is wrong in a folder, and which tensors are missing because of it."""


class HFFolder:
    """The tensors of a folder.

    Args:
        folder: the folder.
        numbers: settings of its config for quantized numbers.
        tied: whether the head is the embedding, so that an index may list a head that no file holds.
        faults: takes what is wrong, with the names of the tensors that are not known for it, and all else is listed;
            None to raise the first fault.

    Attributes:
        tensors: whole and quantized weights, by name.
        quantized: those that are decoded.
        buffers: names of the buffers that the files hold, and that no loader reads.
        shadowed: for tensors in several files: the file that the index names, and another one, by name.

    Raises:
        MisfitError: tensors of a quantized weight do not fit each other.
        ValueError: a file is missing, damaged or no safetensors file, or the files and the index disagree.
    """

    def __init__(
        self, folder: Path, numbers: Numbers | None = None, tied: bool = False, faults: Faults | None = None
    ) -> None:
        self.folder, self._tied, self._faults = folder, tied, faults
        self._open = OpenFiles()
        self.tensors: dict[str, Stored] = {}
        self.buffers: list[str] = []
        self.shadowed: dict[str, tuple[Path, Path]] = {}
        files = _files(folder)
        home = {name: file for file, names in files.items() for name in names or ()}
        for file, names in files.items():
            self._add(file, names or [], home)
        stored = {name: (one.shape, DTYPES.get(one.kind)) for name, one in self.tensors.items()}
        read = lambda name: self._read(self.tensors[name], name)  # noqa: E731
        self.quantized = quantized_weights(stored, numbers or Numbers(), read)
        if misfits := [one.fault for one in self.quantized.values() if one.fault]:
            more = f" ({len(misfits) - 1} other weights have faults too)" if len(misfits) > 1 else ""
            self._wrong(MisfitError(f"{folder}: {misfits[0]}{more}; or give the model in bfloat16."))
        self._parts = {part: self.tensors[part] for one in self.quantized.values() for part in one.parts.values()}
        self._hide_parts()

    def _add(self, file: Path, promised: Sequence[str], home: Mapping[str, Path]) -> None:
        try:
            if promised:
                _check_there(file, self.folder, promised[0])
            found = stored_in(file)
        except ValueError as error:
            self._wrong(error, promised)
            return
        own: dict[str, Stored] = {}
        for name, stored in found.items():
            if BUFFERS.search(name):
                self.buffers.append(name)
            # transformers prefers the single file to the index, and so uses its copies
            elif home.get(name, file) != file and file.name != SINGLE:
                self.shadowed[name] = home[name], file
            else:
                own[name] = stored
        if unknown := [name for name, stored in own.items() if stored.kind not in DTYPES]:
            more = f" (and {len(unknown) - 1} more of such types)" if len(unknown) > 1 else ""
            kind = f"of type '{own[unknown[0]].kind}'{more}, which is none of {', '.join(DTYPES)}"
            self._wrong(ValueError(f"{file} has '{unknown[0]}' {kind}."))
        if twice := [name for name in own if name in self.tensors]:
            more = f" (and {len(twice) - 1} more)" if len(twice) > 1 else ""
            both = f"is both in {self.tensors[twice[0]].file} and in {file}"
            self._wrong(ValueError(f"'{twice[0]}'{more} {both}; remove the file that does not belong."))
        self.tensors = own | self.tensors
        missing = sorted(
            name for name in set(promised) - set(found) if not (self._tied and name.endswith("lm_head.weight"))
        )
        if missing:
            says = f"{file} lacks the tensor '{missing[0]}' that {INDEX} puts there; fetch the file again."
            self._wrong(ValueError(says), missing)

    def _wrong(self, error: ValueError, lost: Sequence[str] = ()) -> None:
        if self._faults is None:
            raise error
        self._faults.append((error, list(lost)))

    def _hide_parts(self) -> None:
        """List weights instead of the tensors that store them, and leave out scales of activations."""
        for name, weight in self.quantized.items():
            first = self._parts[next(iter(weight.parts.values()))]
            for part in weight.parts.values():
                self.tensors.pop(part, None)  # two faulty weights may share a part
            kind = first.kind if weight.shape == first.shape else KINDS[weight.dtype]
            self.tensors[name] = Stored(first.file, weight.shape or (), kind)
        for name in activation_scales(self.tensors.keys()) if self.quantized else ():
            del self.tensors[name]

    def shape(self, name: str) -> Shape:
        """Shape of a tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of the tensor that `read` returns."""
        return self.quantized[name].dtype if name in self.quantized else self.tensors[name].dtype

    @property
    def remarks(self) -> dict[str, str]:
        """Return sentences about what is skipped in the files, by kind."""
        found = {}
        if self.buffers:
            found["skipped buffers"] = (
                f"'{self.buffers[0]}'{_more(self.buffers)} are rotary buffers, which the config implies. They are "
                "skipped, as transformers and vLLM do."
            )
        if self.shadowed:
            name, (named, other) = next(iter(self.shadowed.items()))
            found["duplicate tensors"] = (
                f"Several files hold '{name}'{_more(self.shadowed)}. {INDEX} decides: "
                f"'{named.name}' is read, and the copy in '{other.name}' is ignored. "
                "transformers does the same. vLLM may load either copy: before you serve the folder there, take the "
                "ignored copy out of its file."
            )
        return found

    @property
    def side_files(self) -> list[str]:
        """Return names of files that transformers does not open, because the index or a single file leaves them out."""
        files = {stored.file for stored in self.tensors.values()}
        if (self.folder / INDEX).is_file():
            return sorted(file.name for file in files - _indexed(self.folder).keys())
        return sorted(file.name for file in files if self.folder / SINGLE in files and file.name != SINGLE)

    def bytes_of(self, name: str) -> int:
        """Return the size of a tensor in its file, or of all parts of a quantized weight."""
        if name not in self.quantized:
            return self.tensors[name].bytes
        return sum(self._parts[part].bytes for part in self.quantized[name].parts.values())

    def parts_of(self, name: str) -> dict[str, Tensor]:
        """Read the tensors of a quantized weight, by part."""
        return {part: self._read(self._parts[one], one) for part, one in self.quantized[name].parts.items()}

    def read(self, name: str) -> Tensor:
        """Read a tensor, or decode a quantized weight."""
        if name not in self.quantized:
            return self._read(self.tensors[name], name)
        return self.quantized[name].decode(self.parts_of(name))

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Read a tensor that is not quantized, in order, at most `PIECE` bytes or one row at a time.

        The file is mapped again for every piece: mapped pages that were read count as memory until then.
        """
        stored = self.tensors[name]
        if stored.bytes <= PIECE:
            yield self._read(stored, name)
            return
        rows = max(1, PIECE * stored.shape[0] // stored.bytes)
        for start in range(0, stored.shape[0], rows):
            with safe_open(stored.file, framework="pt") as stream:
                yield stream.get_slice(name)[start : start + rows]

    def check_type(self, name: str, must_be_weight: bool) -> None:
        """Raise ValueError if a weight (any tensor named `.weight`) does not have a numeric dtype."""
        dtype, file = self.dtype(name), self.tensors[name].file
        if dtype == E8M0:
            raise ValueError(
                f"'{name}' in {file} is of type {str(dtype).removeprefix('torch.')}, which is the type of scales; "
                "fetch the weight again, or give the model in bfloat16."
            )
        if not dtype.is_floating_point and (must_be_weight or name.endswith(".weight")):
            raise ValueError(
                f"'{name}' in {file} is of type {str(dtype).removeprefix('torch.')}, but weights are "
                "floating-point numbers; the model is quantized or damaged, so give it in bfloat16."
            )

    def _read(self, stored: Stored, name: str) -> Tensor:
        tensor: Tensor = self._open.file(stored.file).get_tensor(name)
        return tensor


class OpenFiles(threading.local):
    """Each thread's most recently used file handles, because opening a file parses its whole header."""

    def __init__(self) -> None:
        self.file = lru_cache(maxsize=32)(_open)


def _open(file: Path) -> Any:
    # Not memory-mapped: mapped pages would count as memory of this process.
    return safe_open(file, framework="pt", backend="pread")


def stored_in(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, whose header the library checks. Raise ValueError if it is damaged."""
    check_file(file)
    try:
        with safe_open(file, framework="pt") as stream:
            slices = {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118
            return {name: Stored(file, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}.") from None
    except SafetensorError as error:
        what = str(error).splitlines()[0][:120]
        raise ValueError(f"{file} is not a whole safetensors file ({what}); fetch it again.") from None


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files of a folder, each with the tensors that the index lists.

    None for a file that is not in the index.

    Some releases keep MTP layers in a file that the index or transformers leaves out. It is read too.
    """
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith(COPY))
    named = _indexed(folder) if (folder / INDEX).is_file() else {}
    named |= {file: None for file in files if file not in named}
    if named:
        return named
    for pickle in sorted(file for end in ("bin", "pt", "pth") for file in folder.glob(f"*.{end}")):
        raise ValueError(f"{pickle} is a pickle, which can run code and is not opened; save the model as safetensors.")
    raise ValueError(f"{folder} holds no safetensors files; give the folder of a Hugging Face model.")


def _indexed(folder: Path) -> dict[Path, list[str] | None]:
    index = read_json(folder / INDEX)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError(f"{folder / INDEX} has no 'weight_map' from tensors to files; fetch it again.")
    files: dict[Path, list[str]] = {}
    for name, file in weights.items():
        files.setdefault(folder / file, []).append(name)
    return {**files}


def _check_there(file: Path, folder: Path, name: str) -> None:
    """Raise ValueError if a file that the index names for a tensor is not in the folder."""
    if file.parent != folder:
        raise ValueError(
            f"{folder / INDEX} puts '{name}' into '{str(file).removeprefix(f'{folder}/'):.100}', but shards must be "
            "plain file names in the folder itself; move the file there, and correct the index."
        )
    if not file.is_file():
        whole = f", or remove the index, if {SINGLE} is the model" if (folder / SINGLE).is_file() else ""
        raise ValueError(
            f"{folder / INDEX} puts '{name}' into '{file.name:.100}', which is not there; fetch that file{whole}."
        )


def check_kind(folder: Path) -> None:
    """Raise ValueError for a folder that does not convert, or for a path that is not a folder."""
    check_form(folder)
    if not (folder / CONFIG).is_file():
        return
    method, methods = QuantizationSettings.of(folder, _object(folder / CONFIG)).method, readable_methods()
    if method is not None and not method.startswith(tuple(methods)):
        raise ValueError(
            f"{folder} is quantized with {method!s:.40}, which is not read here; give the model in bfloat16, or by "
            f"{', '.join(methods)}."
        )


def check_form(folder: Path) -> None:
    """Raise ValueError for what is not a folder of a whole model: GGUF, broken links, an adapter."""
    of_gguf = any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))
    if of_gguf or (folder.is_file() and folder.suffix == ".gguf"):
        raise ValueError(f"{folder} is a GGUF model, as llama.cpp runs it; give the folder that it was made from.")
    if not folder.is_dir():
        what = (
            "is a file; give the folder that it is in" if folder.is_file() else "is not a folder; give that of a model"
        )
        raise ValueError(f"{folder} {what}.")
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} is a link to {path.readlink()}, which is not there; fetch the folder again.")
    if _is_adapter(folder):
        base = _object(folder / ADAPTER).get("base_model_name_or_path") or "its base model"
        raise ValueError(
            f"{folder} is an adapter (LoRA) of {base!s:.100}; merge it into that model (merge_and_unload() of peft), "
            "save the result, and give its folder."
        )


def drafter_kind(path: Path) -> str | None:
    """Return the kind of drafter, one of `spec.kinds.DRAFTERS`, that a folder has; None if it is not a drafter."""
    try:
        keys = read_json(path / CONFIG)
    except ValueError:
        return None
    named = keys.get("architectures") if isinstance(keys, dict) else None
    if not isinstance(named, list):
        return None
    rows = DRAFTERS.values()
    inner = keys.get("dflash_config")
    projector = inner.get("projector_type") if isinstance(inner, dict) else None
    if projector is not None and (own := next((row.name for row in rows if row.projector_type == projector), None)):
        return own
    names = {name: row.name for row in rows for name in (row.architecture, *row.also_called, *row.latent_architectures)}
    if (kind := next((names[name] for name in named if name in names), None)) is not None:
        return kind
    shared = next((row.name for row in rows if row.published_as in named), None)
    return shared if shared is not None and _names_of(path) >= UNLIKE_MODELS else None


def _names_of(folder: Path) -> set[str]:
    """Return names of a folder's tensors, as far as its files can be read."""
    names = set[str]()
    for file in folder.glob("*.safetensors"):
        with suppress(OSError, SafetensorError), safe_open(file, "pt") as opened:
            names.update(opened.keys())
    return names


def _is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter (LoRA), with or without a config, and no model."""
    weights = [file.name for file in folder.glob("*.safetensors")]
    whole = any(not name.startswith("adapter_") for name in weights)
    return (folder / ADAPTER).is_file() and not (whole and (folder / CONFIG).is_file())


def _more(names: Collection[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _object(path: Path) -> dict[str, Any]:
    keys = read_json(path)
    if not isinstance(keys, dict):
        raise ValueError(f"{path} holds a {type(keys).__name__}, not an object of keys; fetch it again.")
    return keys
