"""Hugging Face folders of safetensors: tensors are found and checked by the headers, read and written one by one.

Folders in pickle form are refused and never opened. Quantised tensors are read as bfloat16 (quantised.py), and their
scales are not listed as tensors.
"""

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_mtp.checkpoint.hf.config import check_file, read_json
from megatron_mtp.checkpoint.hf.quantised import BLOCK_SCALE, FP8, SCALE, activation_scales, coded_weights
from megatron_mtp.patches.checksums import crc32_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COPY = "consolidated"
"""Prefix of files that repeat the model in another format (Mistral's); they are ignored."""
NOT_KEPT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Endings of the files that hold weights; all others are copied with the config."""
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
"""Types by their names in safetensors headers."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: shape and type as stored."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class HFFolder:
    """The tensors of a folder.

    Args:
        folder: the folder.
        block: rows and columns that share a scale, in FP8 tensors.

    Raises:
        ValueError: a file is missing, damaged or no safetensors file, or the files and the index disagree.
    """

    def __init__(self, folder: Path, block: tuple[int, int] = (128, 128)) -> None:
        self.folder = folder
        self._open = _OpenFiles()
        self.tensors: dict[str, Stored] = {}
        for file, names in _files(folder).items():
            self._add(file, names)
        coded = coded_weights({name: (one.shape, one.dtype) for name, one in self.tensors.items()}, block)
        self._coded = {name: (one, [self.tensors[part] for part in one.parts]) for name, one in coded.items()}
        self._take_apart()

    def _add(self, file: Path, promised: Sequence[str] | None) -> None:
        found = read_header(file)
        missing = sorted(set(promised or ()) - set(found))
        if missing:
            raise ValueError(f"{file} lacks the tensor '{missing[0]}' that {INDEX} puts there; fetch the file again.")
        for name, stored in found.items():
            if name in self.tensors:
                raise ValueError(
                    f"'{name}' is both in {self.tensors[name].file} and in {file}; remove the file that does not "
                    "belong."
                )
            self.tensors[name] = stored

    def _take_apart(self) -> None:
        """List weights in the place of the tensors that hold them, and leave out scales of activations."""
        for name, (coded, (first, *_)) in self._coded.items():
            for part in coded.parts:
                del self.tensors[part]
            self.tensors[name] = first if name in coded.parts else Stored(first.file, coded.shape, torch.bfloat16)
        for name in activation_scales(self.tensors.keys()) if self._coded else ():
            del self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of the tensor that `read` returns."""
        return torch.bfloat16 if name in self._coded else self.tensors[name].dtype

    @property
    def quantised(self) -> bool:
        """Whether the folder has tensors that are read as bfloat16."""
        return bool(self._coded)

    def read(self, name: str) -> Tensor:
        """Read a tensor; a quantised one is returned as bfloat16."""
        if name not in self._coded:
            return self._read(self.tensors[name], name)
        coded, stored = self._coded[name]
        return coded.decode(*map(self._read, stored, coded.parts))

    def check_type(self, name: str, must_be_weight: bool) -> None:
        """Check that a weight has a floating-point type.

        Args:
            name: name of the tensor.
            must_be_weight: whether the tensor is a weight; any tensor named `.weight` counts as one.

        Raises:
            ValueError: a weight has another type, or a tensor is FP8 without scales.
        """
        dtype, file = self.dtype(name), self.tensors[name].file
        if dtype in FP8:
            raise ValueError(
                f"'{name}' in {file} is FP8 without a '{name}{BLOCK_SCALE}' or '{name}{SCALE}'; give the "
                "model in bfloat16."
            )
        if not dtype.is_floating_point and (must_be_weight or name.endswith(".weight")):
            raise ValueError(
                f"'{name}' in {file} is of type {str(dtype).removeprefix('torch.')}, but weights are floating-point "
                "numbers; the model is quantised or damaged, so give it in bfloat16."
            )

    def _read(self, stored: Stored, name: str) -> Tensor:
        tensor: Tensor = self._open.file(stored.file).get_tensor(name)
        return tensor


class _OpenFiles(threading.local):
    """Each thread's handles of the files that it used last: opening a file parses its whole header."""

    def __init__(self) -> None:
        self.file = lru_cache(maxsize=32)(_open)


def _open(file: Path) -> Any:
    # Not mapped: pages of mapped files would count as memory of this process.
    return safe_open(file, framework="pt", backend="pread")


def block_of(keys: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale in an FP8 release, from the config's keys; 128 and 128 by default."""
    for block in _named_blocks(keys.get("quantization_config")):
        if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
            return block[0], block[1]
    return 128, 128


def _named_blocks(settings: Any) -> Iterator[Any]:
    """Sizes of a block where DeepSeek's configs have them, and where those of compressed-tensors do."""
    if isinstance(settings, dict):
        yield settings.get("weight_block_size")
        groups = settings.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            yield weights.get("block_structure") if isinstance(weights, dict) else None


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Files of a folder, each with the tensors that the index lists; None without an index."""
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith(COPY))
    named: dict[Path, list[str] | None] = dict.fromkeys(files)
    if (folder / INDEX).is_file():
        named = _indexed(folder)
    elif (folder / SINGLE) in files:
        named = {folder / SINGLE: None}
    beside = [file for file in files if file not in named]
    if beside:
        by = INDEX if (folder / INDEX).is_file() else f"a folder with {SINGLE}"
        raise ValueError(
            f"{beside[0]} is no file of {by}, and nothing is dropped silently; remove it, or name its tensors in "
            f"{INDEX}."
        )
    if named:
        return named
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run code and is never opened here; save the model as safetensors."
        )
    raise ValueError(f"{folder} holds no safetensors files; give the folder of a Hugging Face model.")


def _indexed(folder: Path) -> dict[Path, list[str] | None]:
    index = read_json(folder / INDEX)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError(f"{folder / INDEX} has no 'weight_map' from tensors to files; fetch it again.")
    files: dict[Path, list[str] | None] = {}
    for name, file in weights.items():
        path = folder / file
        if Path(file).name != file or not path.is_file():
            raise ValueError(f"{folder / INDEX} puts '{name}' into '{file:.100}', which is not there; fetch that file.")
        names = files.setdefault(path, [])
        assert names is not None
        names.append(name)
    return files


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, from its header.

    Raises:
        ValueError: it is truncated, damaged or something else, or has a type that is not known here.
    """
    tensors = raw_header(file)
    unknown = next((f"{name}' of type '{v['dtype']}" for name, v in tensors.items() if v["dtype"] not in DTYPES), None)
    if unknown is not None:
        raise ValueError(f"{file} has '{unknown}', which is not known here; known are {', '.join(DTYPES)}.")
    return {name: Stored(file, tuple(v["shape"]), DTYPES[v["dtype"]]) for name, v in tensors.items()}


def raw_header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file, by tensor: `dtype`, `shape`, `data_offsets`, and the `start` of all data.

    The safetensors library checks that the file is whole.

    Raises:
        ValueError: it is truncated, damaged or something else.
    """
    check_file(file)
    try:
        with safe_open(file, framework="pt"), open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length), object_pairs_hook=_each_once)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}.") from None
    except (SafetensorError, ValueError, RecursionError) as error:
        what = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ValueError(f"{file} is not a whole safetensors file ({what}); fetch it again.") from None
    return {name: {**value, "start": 8 + length} for name, value in header.items() if name != "__metadata__"}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError where a name is there twice, of which readers take one or the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


class HFShards:
    """Safetensors files that are being written: all headers first, then the tensors in any order.

    Args:
        folder: the folder to write to.
        tensors: name, shape and type of every tensor, in the order of the files.
        largest: largest size of a file in bytes, unless a single tensor is larger.
        resumed: whether an interrupted run left the files.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
        largest: int,
        resumed: bool = False,
    ) -> None:
        self._places: dict[str, tuple[Path, int, torch.dtype]] = {}
        self._lengths: dict[str, int] = {}
        shards = _shards(tensors, largest)
        files = (
            [SINGLE]
            if len(shards) == 1
            else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        )
        total = 0
        for name, shard in zip(files, shards, strict=True):
            total += self._open(folder / name, shard, resumed)
        if len(shards) > 1:
            weights = {tensor: place[0].name for tensor, place in sorted(self._places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _open(self, file: Path, shard: list[tuple[str, tuple[int, ...], torch.dtype]], resumed: bool) -> int:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape, dtype in shard:
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self._places[name], self._lengths[name] = (file, start, dtype), end - start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._places |= {name: (file, self._places[name][1] + 8 + len(text), dtype) for name, _, dtype in shard}
        with open(file, "r+b" if resumed and file.exists() else "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
        return end

    def write(self, name: str, tensor: Tensor) -> int:
        """Write a tensor at its place, and return the CRC-32 of its bytes."""
        file, start, dtype = self._places[name]
        data = tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
        descriptor = os.open(file, os.O_WRONLY)
        try:
            view, done = memoryview(data), 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], start + done)
        finally:
            os.close(descriptor)
        return zlib.crc32(view)

    def sync(self, names: Iterable[str]) -> None:
        """Wait until these tensors are on the disk."""
        for file in {self._places[name][0] for name in names}:
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())

    def holds(self, checksums: dict[str, int]) -> bool:
        """Whether the files hold these tensors, given the CRC-32 of each by name."""
        return isinstance(checksums, dict) and all(map(self._holds, checksums, checksums.values()))

    def _holds(self, name: str, checksum: int) -> bool:
        if name not in self._places:
            return False
        file, start, length = self._places[name][0], self._places[name][1], self._lengths[name]
        with open(file, "rb") as stream:
            return crc32_of(stream, start, length) == checksum


def _shards(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], largest: int
) -> list[list[tuple[str, tuple[int, ...], torch.dtype]]]:
    shards: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    size = 0
    for name, shape, dtype in tensors:
        more = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + more > largest:
            shards.append([])
            size = 0
        shards[-1].append((name, shape, dtype))
        size += more
    return shards
