"""Safetensors files of a Hugging Face folder, written in place: all headers first, then the tensors in any order."""

import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_mtp.checkpoint.hf import Shape
from megatron_mtp.checkpoint.hf.folder import INDEX, KINDS, SINGLE
from megatron_mtp.megatron.checkpoint.catalogue import crc32_of

DescribedTensor = tuple[str, Shape, torch.dtype]
"""Name, shape and type of a tensor."""


class HFShards:
    """Safetensors files that are being written.

    Args:
        folder: folder to write to.
        tensors: tensors in file order.
        largest: maximum size of a file in bytes, unless a single tensor is larger.
        resumed: whether an interrupted run left the files.
    """

    def __init__(self, folder: Path, tensors: Iterable[DescribedTensor], largest: int, resumed: bool = False) -> None:
        self._places: dict[str, tuple[Path, int, torch.dtype]] = {}
        self._lengths: dict[str, int] = {}
        shards = _shards(tensors, largest)
        total = 0
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
            total += self._open(folder / file, shard, resumed)
        if len(shards) > 1:
            weights = {tensor: place[0].name for tensor, place in sorted(self._places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _open(self, file: Path, shard: list[DescribedTensor], resumed: bool) -> int:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape, dtype in shard:
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [start, end]}
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
        """Wait until these tensors are on disk."""
        for file in {self._places[name][0] for name in names}:
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())

    def holds(self, checksums: dict[str, int]) -> bool:
        """Return whether the files contain these tensors, given the CRC-32 of each by name."""
        if not isinstance(checksums, dict) or not checksums.keys() <= self._places.keys():
            return False
        for name, checksum in checksums.items():
            file, start, _ = self._places[name]
            with open(file, "rb") as stream:
                if crc32_of(stream, start, self._lengths[name]) != checksum:
                    return False
        return True


def _shards(tensors: Iterable[DescribedTensor], largest: int) -> list[list[DescribedTensor]]:
    shards: list[list[DescribedTensor]] = [[]]
    size = 0
    for name, shape, dtype in tensors:
        more = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + more > largest:
            shards.append([])
            size = 0
        shards[-1].append((name, shape, dtype))
        size += more
    return shards
