"""Patches of how checkpoints are read and written: no code from pickles, and a checksum for every entry."""

import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import torch

from megatron_mtp.megatron.checkpoint.catalogue import DamagedError, foreign, load_catalogue
from megatron_mtp.megatron.checkpoint.sealing import Summed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def read_metadata(reader: Any, *_: Any, **settings: Any) -> "Metadata":
    """Replacement of `FileSystemReader.read_metadata`."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    with reader.fs.create_stream(reader._get_metadata_path(settings.get("rank")), "rb") as stream:
        metadata = load_catalogue(stream)
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = reader.load_id
    return metadata


def load_bytes(planner: Any, read_item: Any, value: IO[bytes]) -> None:
    """Replacement of `DefaultLoadPlanner.load_bytes`."""
    from torch.distributed.checkpoint._traverse import set_element

    name = read_item.dest_index.fqn
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedError(f"its entry '{name}' holds {foreign(error)}") from None
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded


def with_checksum(write_item: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_write_item`, which writes an entry, to add a checksum to its location. Megatron inspects the signature."""

    @functools.wraps(write_item)
    def write(transforms: Any, stream: IO[bytes], *rest: Any, **settings: Any) -> Any:
        summed = Summed(stream)
        result = write_item(transforms, summed, *rest, **settings)
        result.storage_data.crc32 = summed.crc32
        return result

    return write


# --- probes: is the bug present? -------------------------------------------------------------------------------------


class Planted:
    """A class that no checkpoint contains, for probes."""


def unpickles_catalogues(read_metadata: Callable[..., Any]) -> bool:
    """Return whether the metadata may name any class."""

    @contextmanager
    def stream(*_: Any) -> Iterator[io.BytesIO]:
        yield io.BytesIO(pickle.dumps(Planted()))

    reader = SimpleNamespace(
        fs=SimpleNamespace(create_stream=stream), _get_metadata_path=lambda *_: "catalogue", load_id=None
    )
    try:
        read_metadata(reader)
    except pickle.UnpicklingError:
        return False
    return True


def unpickles_objects(load_bytes: Callable[..., Any]) -> bool:
    """Return whether an entry may name any class."""
    content = io.BytesIO()
    torch.save(Planted(), content)
    content.seek(0)
    planner = SimpleNamespace(flatten_state_dict=False, state_dict={})
    try:
        load_bytes(planner, SimpleNamespace(dest_index=SimpleNamespace(fqn="entry")), content)
    except (pickle.UnpicklingError, ValueError):
        return False
    return "entry" in planner.state_dict


def writes_no_checksum(write_item: Callable[..., Any]) -> bool:
    """Return whether the record of an entry's location has no checksum."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms
    from torch.distributed.checkpoint.planner import WriteItemType

    item = SimpleNamespace(type=WriteItemType.BYTE_IO, index=None)
    content = io.BytesIO(b"bytes")
    written = write_item(
        _StorageWriterTransforms(), io.BytesIO(), content, item, "file", SerializationFormat.TORCH_SAVE
    )
    return not any(part in name for name in vars(written.storage_data) for part in ("crc", "checksum", "hash", "sha"))


def reads_damaged_bytes(slice_file: Callable[..., Any]) -> bool:
    """Return whether an entry is opened even if its checksum does not match."""
    place = SimpleNamespace(relative_path="file", offset=0, length=5, crc32=0, transform_descriptors=None)
    try:
        slice_file(SimpleNamespace(), io.BytesIO(b"bytes"), place)
    except ValueError:
        return False
    return True
