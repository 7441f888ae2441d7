"""checks.py: datasets written by Megatron's own builder, each damaged in one way."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from written_datasets import write_dataset

from megatron_mtp.data import checks
from megatron_mtp.data.checks import check_data_prefixes, check_split, check_weights


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "c", [[5, 6, 0], [9, 0]])


def refusal(prefix: str, vocab_size: int = 10) -> str:
    with pytest.raises(ValueError, match=r"^--data-path: ") as error:
        check_data_prefixes([prefix], vocab_size)
    message = str(error.value)
    assert prefix in message
    assert "\n" not in message
    assert "preprocess" in message
    return message


@pytest.mark.parametrize("blend", ["", "a", "a b", "a b c", "0.3 a 0.7 b", "30 a", "0.3 a b"])
def test_whole_blends_pass(blend: str) -> None:
    check_weights(blend.split())


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "1e400"])
def test_an_invalid_blend_weight_is_rejected(weight: str) -> None:
    with pytest.raises(ValueError, match=f"--data-path: {weight} is not a weight of a dataset; give a number"):
        check_weights(["0.5", "a", weight, "b"])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_whole_datasets_pass(tmp_path: Path, dtype: type[np.integer]) -> None:
    prefixes = [write_dataset(tmp_path / name, [[5, 6, 0], [9, 0]], dtype) for name in ("a", "b")]
    check_data_prefixes([*prefixes, "s3://bucket/left/to/megatron"], vocab_size=10)


def test_missing_files(prefix: str, tmp_path: Path) -> None:
    assert f"there is no dataset '{tmp_path}/none'" in refusal(f"{tmp_path}/none")
    (tmp_path / "c.idx").rename(tmp_path / "kept")
    assert "c.idx missing); make it with" in refusal(prefix)
    (tmp_path / "kept").rename(tmp_path / "c.idx")
    (tmp_path / "c.bin").unlink()
    assert "c.bin missing); make it with" in refusal(prefix)


@pytest.mark.parametrize("documents", [[], [[]]])
def test_empty_dataset(tmp_path: Path, documents: list[list[int]]) -> None:
    empty = write_dataset(tmp_path / "e", documents)
    assert f"is empty ({len(documents)} documents, 0 tokens)" in refusal(empty)


def test_damaged_index(prefix: str) -> None:
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    # magic 9, version 8, dtype 1, counts 8 + 8; then 2 lengths of 4, 2 offsets of 8 and 3 bounds of 8 bytes
    assert len(whole) == 34 + 8 + 16 + 24
    for damaged in (b"", whole[:20], b"PK" + whole[2:], whole[:17] + b"\x07" + whole[18:]):
        index.write_bytes(damaged)
        assert "is not an index that Megatron wrote" in refusal(prefix)
    for damaged in (whole[:-1], whole[:34]):
        index.write_bytes(damaged)
        assert f"has {len(damaged)} bytes where 82 belong: it was cut off" in refusal(prefix)
    index.write_bytes(whole[:18] + struct.pack("<Q", 2**60) + whole[26:])
    assert "it was cut off" in refusal(prefix)


@pytest.mark.parametrize(("place", "value"), [(34, 0xFF), (37, 0x80), (50, 0x01), (58, 0x07), (74, 0x09)])
def test_an_index_whose_sequences_do_not_follow_each_other(prefix: str, place: int, value: int) -> None:
    """A length that is too large or negative, a wrong start, and documents out of order or beyond the end."""
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    index.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
    assert "its sequences do not follow each other" in refusal(prefix)


def test_bin_that_does_not_belong_to_the_index(prefix: str) -> None:
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0\0")
    assert "c.bin' has 12 bytes where its index lists 10" in refusal(prefix)


def test_token_beyond_the_vocabulary(prefix: str) -> None:
    check_data_prefixes([prefix], vocab_size=10)
    message = refusal(prefix, vocab_size=9)
    assert "holds the token id 9, but the tokenizer has ids up to 8 (vocabulary of 9)" in message
    assert "--tokenizer-model (or --vocab-size)" in message


def test_negative_token(tmp_path: Path) -> None:
    assert "holds the token id -1" in refusal(write_dataset(tmp_path / "n", [[1, -1]], np.int32))


def test_sidecar_is_believed_only_if_it_belongs_to_the_bin(prefix: str) -> None:
    sidecar = Path(f"{prefix}.json")
    sidecar.write_text(json.dumps({"tokens": 5, "max_token_id": 70}))
    assert "token id 70" in refusal(prefix)
    endless = '{"tokens": 5, "max_token_id": 1e999}'
    for other in (json.dumps({"tokens": 6, "max_token_id": 70}), "[]", "{", json.dumps({"tokens": 5}), endless):
        sidecar.write_text(other)
        check_data_prefixes([prefix], vocab_size=10)


def test_long_datasets_are_scanned_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 slices of 2 of 100 tokens start at 0, 14, 28, 42, 56, 70, 84, 98: the last is checked, the 50th is not."""
    monkeypatch.setattr(checks, "SCAN_TOKENS", 16)
    monkeypatch.setattr(checks, "SLICES", 8)
    tokens = np.ones(100, dtype=int)
    tokens[50] = 30
    check_data_prefixes([write_dataset(tmp_path / "a", [tokens.tolist()])], vocab_size=10)
    tokens[99] = 20
    assert "token id 20" in refusal(write_dataset(tmp_path / "b", [tokens.tolist()]))
    monkeypatch.setattr(checks, "SCAN_TOKENS", 100)
    assert "token id 30" in refusal(write_dataset(tmp_path / "c", [tokens.tolist()]))


def tokenizer_folder(folder: Path, vocabulary: dict[str, int]) -> str:
    folder.mkdir()
    content = {"model": {"vocab": vocabulary}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def test_a_corpus_of_another_vocabulary_is_refused(prefix: str, tmp_path: Path) -> None:
    own = tokenizer_folder(tmp_path / "own", {"a": 0, "b": 1})
    same = tokenizer_folder(tmp_path / "same", {"b": 1, "a": 0})
    other = tokenizer_folder(tmp_path / "other", {"a": 1, "b": 0})
    Path(f"{prefix}.json").write_text(
        json.dumps({"tokenizer": own, "vocabulary_sha256": checks.vocabulary_digest(own)})
    )
    for fits in (own, same, str(tmp_path)):  # without a tokenizer.json there is nothing to compare
        checks.check_tokenizer([prefix], fits)
    with pytest.raises(ValueError, match=r"^--data-path: .* vocabulary is not that of --tokenizer-m"):
        checks.check_tokenizer([prefix], other)
    Path(f"{prefix}.json").write_text(json.dumps({"vocabulary_sha256": "of another one"}))
    with pytest.raises(ValueError, match="the tokenizer None, whose vocabulary is not that of"):
        checks.check_tokenizer([prefix], other)


@pytest.mark.parametrize("split", ["50,50,0", "100,0,0", "1", "34, 33, 33", "0,1,0"])
def test_splits_with_text_in_every_part_pass(split: str, tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "c", [[5, 6, 0], [9, 0], [7, 0]])
    check_split([prefix, "s3://bucket/left/to/megatron"], split)


@pytest.mark.parametrize(
    ("split", "part"),
    [("98,2,0", "validation"), ("969, 30, 1", "validation"), ("60,39,1", "testing"), ("1,99", "training")],
)
def test_a_part_without_text_is_refused(split: str, part: str, tmp_path: Path) -> None:
    """Megatron would search it for text forever."""
    prefix = write_dataset(tmp_path / "c", [[5, 6, 0], [9, 0], [7, 0]])
    with pytest.raises(ValueError, match=rf"--split is {split}, .* '{prefix}' leaves none for {part}"):
        check_split([prefix], split)
