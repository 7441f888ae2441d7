"""Every family: a round trip from Hugging Face to Megatron is bit-identical, in tensors and in config keys."""

import runpy
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from documents import ROOT
from hf_models import CASES, differing_keys, make, read
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import kept_form
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.families import FAMILIES, FILES, own_families
from megatron_mtp.checkpoint.families.family import Family

QUIET = Options(quiet=True, workers=1)


def there_and_back(folder: Path, name: str, depths: int, dtype: torch.dtype, shards: bool = False) -> tuple[Path, Path]:
    source = make(folder / "source", name, depths, dtype, shards)
    hf_to_mcore(source, folder / "mcore", QUIET)
    form = kept_form(folder / "mcore")
    assert form is not None
    mcore_to_hf(folder / "mcore", folder / "back", Options(quiet=True, shard_bytes=100_000), form)
    return source, folder / "back"


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


COUNTED = {("qwen3_next", 0): {"mtp_num_hidden_layers": 0}, ("mimo_v2_flash", 1): {"num_nextn_predict_layers": 1}}
"""Keys that an export adds if a folder's MTP layers differ from the published number and its config does not count
them.
"""


@pytest.mark.parametrize(("name", "depths"), tiered(CASES, [*dict(CASES).items()][::3]))  # the most MTP layers
def test_a_round_trip_gives_back_every_bit_and_key(tmp_path: Path, name: str, depths: int) -> None:
    source, back = there_and_back(tmp_path, name, depths, torch.bfloat16)
    same(read(source), read(back))
    counted = COUNTED.get((name, depths), {})
    assert differing_keys(source, back) == {key: ("absent", count) for key, count in counted.items()}
    assert (back / "tokenizer.json").is_file()


TABLES = runpy.run_path(str(ROOT / "tools/docs/family_tables.py"))


@pytest.mark.parametrize(
    "table", [TABLES["families_table"], TABLES["trained_table"], lambda families: TABLES["forms_table"]()]
)
def test_the_tables_of_the_pages_are_those_of_the_families(table: Callable[[Iterable[Family]], str]) -> None:
    """`python tools/docs/family_tables.py` prints the tables."""
    pages = [
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("reference/families", "guides/convert")
    ]
    assert any(f"\n{table(own_families())}\n" in page for page in pages)


@pytest.mark.parametrize("file", FILES)
def test_the_list_of_files_has_every_model_type(file: str) -> None:
    rows = EntryPoint("", f"megatron_mtp.checkpoint.families.{file}", "").load()
    assert FILES[file].split() == [model_type for row in rows for model_type in row.model_types]


def test_every_model_type_belongs_to_one_family() -> None:
    named = [model_type for family in own_families() for model_type in family.model_types]
    assert sorted(named) == sorted(set(named) & FAMILIES.keys())
    assert len(named) == sum(len(types.split()) for types in FILES.values())


def test_a_family_has_either_megatron_flags_or_a_reason() -> None:
    with pytest.raises(ValueError, match="Heron needs either Megatron's flags or the reason"):
        Family("Heron", "Heron-1B", ("heron",), lambda config, layout: [])
    with pytest.raises(ValueError, match="Heron names no model_type"):
        Family("Heron", "Heron-1B", (), lambda config, layout: [], untrainable="wings")
