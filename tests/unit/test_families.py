"""Every family: Hugging Face to Megatron and back is equal bit by bit, in tensors and in config keys."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import CASES, make, read
from torch import Tensor

from megatron_mtp.checkpoint.convert.exporting import kept_form, mcore_to_hf
from megatron_mtp.checkpoint.convert.importing import Options, hf_to_mcore
from megatron_mtp.checkpoint.convert.megatron_flags import megatron_arguments

QUIET = Options(quiet=True, workers=1)


def there_and_back(folder: Path, name: str, depths: int, dtype: torch.dtype, shards: bool = False) -> tuple[Path, Path]:
    source = make(folder / "source", name, depths, dtype, shards)
    hf_to_mcore(source, folder / "mcore", QUIET, megatron_arguments)
    form = kept_form(folder / "mcore")
    assert form is not None
    mcore_to_hf(folder / "mcore", folder / "back", Options(quiet=True, shard_bytes=100_000), form)
    return source, folder / "back"


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("name", "depths"), CASES)
def test_a_round_trip_gives_back_every_bit_and_key(tmp_path: Path, name: str, depths: int) -> None:
    source, back = there_and_back(tmp_path, name, depths, torch.bfloat16)
    same(read(source), read(back))
    assert json.loads((source / "config.json").read_text()) == json.loads((back / "config.json").read_text())
    assert (back / "tokenizer.json").is_file()
