"""data/sources.py and training/documents.py: acceptance by source, counted per document."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from answer_texts import config, rows, written
from megatron.core.datasets.utils import Split

from megatron_mtp.cli import main as cli
from megatron_mtp.cli.evaluate import source_table
from megatron_mtp.common.acceptance import AcceptanceStats, error_of, figures_of, gain_of, record_of, with_others
from megatron_mtp.data.named_sources import named_source, sources_of_files
from megatron_mtp.data.sources import first_number, read_sources, sources_of
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.losses.acceptance import sums_of_documents
from megatron_mtp.training import documents
from megatron_mtp.training.documents import gathered
from megatron_mtp.training.read_runs import read_documents
from megatron_mtp.training.run_files import write_documents
from megatron_mtp.training.texts import TextDataset


def test_the_source_of_a_file_is_its_top_level_folder() -> None:
    files = ["texts/code/a/one.py", "texts/prose/two.txt", "texts/chats.jsonl", "texts/three.txt"]
    assert list(sources_of_files(files).values()) == ["code", "prose", "chats", "texts"]
    assert sources_of_files(["here/one.txt", "here/two.txt"]) == {"here/one.txt": "here", "here/two.txt": "here"}
    assert sources_of_files([]) == {}


def test_a_line_names_its_category_or_its_source() -> None:
    speed_bench = {"category": "coding", "source": "HumanEval", "turns": ["Sort a list."]}
    assert named_source(speed_bench) == "coding"
    assert named_source({"source": "wiki", "category": None}) == "wiki"
    assert named_source({"source": {"url": "x"}}) is None
    assert named_source([1]) is None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create four documents of three sources, and their tokenizer."""
    place = tmp_path_factory.mktemp("sources")
    tokenizer = train_bpe(["some words to make a vocabulary of"] * 3, 260, place / "bpe")
    for name, text in {"code/a.py": "x = 1", "web.jsonl": '{"text": "a"}\n{"text": "b", "source": "wiki"}\n'}.items():
        (place / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "texts" / name).write_text(text)
    (place / "texts" / "code" / "b.py").write_text("y = 2")
    flags = ["--input", place / "texts", "--tokenizer", tokenizer, "--output-prefix", place / "c", "--no-shuffle"]
    assert cli.main(["preprocess", *map(str, flags), "--workers", "1"]) == 0
    return place


def test_a_corpus_keeps_the_source_of_every_document(corpus: Path) -> None:
    names, places = read_sources(str(corpus / "c"))
    assert [names[place] for place in places] == ["code", "code", "web", "wiki"]
    first = first_number(str(corpus / "c"))
    assert sources_of([first + 3, first], [str(corpus / "c")]) == ["wiki", "code"]


def test_damaged_sources_are_rejected_and_missing_ones_are_one_source(corpus: Path) -> None:
    file, sidecar = corpus / "c.sources.npy", corpus / "c.json"
    whole, about = file.read_bytes(), sidecar.read_text()
    for damaged in (whole[:-4], b"junk"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"c.sources.npy' is damaged, .*c.idx'; make"):
            read_sources(str(corpus / "c"))
    file.unlink()
    sidecar.write_text("{}")
    assert sources_of([first_number(str(corpus / "c")) + 2], [str(corpus / "c")]) == ["c"]
    file.write_bytes(whole)
    sidecar.write_text(about)


@pytest.mark.usefixtures("megatron")
def test_a_document_in_two_batches_counts_with_both() -> None:
    """Documents 3 and 5, of which only 3 continues in the second batch; no position of 7 counts."""
    first = torch.tensor([3, 5, 7]), torch.tensor([1.0, 2.0, 0.0])[:, None, None].expand(3, 4, 2)
    second = torch.tensor([3]), torch.full((1, 4, 2), 10.0)
    found = gathered({"mtp": [first, second], "drafter": [second]})
    assert {
        name: {number: counts_4D.unique().item() for number, counts_4D in of.items()} for name, of in found.items()
    } == {
        "mtp": {3: 11.0, 5: 2.0},
        "drafter": {3: 10.0},
    }


@pytest.mark.usefixtures("megatron")
def test_documents_of_data_and_context_parallel_ranks_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share document 3; only the other rank has document 5."""
    own, others = ([(torch.tensor(numbers), torch.ones(len(numbers), 4, 1))] for numbers in ([3], [3, 5]))
    one_rank = documents.mpu.get_data_parallel_group()

    def groups(with_context_parallel: bool = False) -> Any:
        return SimpleNamespace(size=lambda: 2) if with_context_parallel else one_rank

    def all_gather_object(found: list[Any], given: Any, group: Any) -> None:
        found[:] = [given, {"mtp": others}][: group.size()]

    monkeypatch.setattr(documents.mpu, "get_data_parallel_group", groups)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    found = documents.gathered({"mtp": own})["mtp"]
    assert {number: counts_4D.unique().item() for number, counts_4D in found.items()} == {3: 2.0, 5: 1.0}


@pytest.mark.usefixtures("megatron")
def test_a_row_of_an_evaluation_says_which_document_each_position_is_of(tmp_path: Path) -> None:
    prefix = written(tmp_path, [[5, 6, 7, 8], [3, 4, 9, 1]], [(2, 5), (2, 4)])
    data: Any = rows(TextDataset, prefix, config(8))
    data.document_index, data.sample_index = np.array([1, 0]), np.array([[0, 1], [1, 4]])
    assert "documents" not in data[0]
    data.index_split, first = Split.valid, first_number(prefix)
    assert data[0]["tokens"].tolist() == [4, 9, 1, 0, 5, 6, 7, 8]
    assert (data[0]["documents"] - first).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_counts_of_positions_are_added_by_document() -> None:
    counts_4DSB = torch.arange(4.0).view(4, 1, 1, 1) + torch.tensor([[1.0, 10], [100, 1000]])  # S 2, B 2
    numbers, sums = sums_of_documents(counts_4DSB, torch.tensor([[7, 7], [5, 7]]))  # [B, S]
    assert numbers.tolist() == [5, 7]
    assert sums[:, 0, 0].tolist() == [10, 1 + 100 + 1000]
    assert sums[:, 3, 0].tolist() == [13, 1 + 100 + 1000 + 3 * 3]


def document(accepted: int, offered: int = 10) -> AcceptanceStats:
    return AcceptanceStats(offered_at=[offered], reached_at=[offered], accepted_at=[accepted], overlap_at=[0.0])


def test_the_error_of_a_gain_is_paired_by_document() -> None:
    """Documents that differ widely, but all gain one in ten: the gain is certain, each rate is not."""
    before = [document(accepted) for accepted in (0, 1, 8, 9, 0, 1, 8, 9)]
    after = [document(accepted + 1) for accepted in (0, 1, 8, 9, 0, 1, 8, 9)]
    gain, error = gain_of(before, after)
    assert gain == pytest.approx(0.1)
    assert error == pytest.approx(0, abs=1e-12)
    assert error_of(after) == pytest.approx(0.4 / 8**0.5, rel=0.05)  # 0.4: standard deviation of a document's rate


def test_with_few_documents_the_error_is_over_tokens() -> None:
    assert error_of([document(5)] * 4) == pytest.approx((0.25 / 40) ** 0.5)
    assert gain_of([document(5)] * 4, [document(7)] * 4) == pytest.approx((0.2, (0.21 / 40) ** 0.5))


def test_sources_with_few_documents_are_merged() -> None:
    many = {number: document(5) for number in range(8)}
    sources = {"code": many, "a": {8: document(1)}, "b": {9: document(3)}}
    assert {name: list(each) for name, each in with_others(sources).items()} == {
        "code": list(range(8)),
        "others": [8, 9],
    }
    assert with_others({"code": many, "a": {8: document(1)}}).keys() == {"code", "a"}


def test_a_record_has_sources_apart() -> None:
    many = {number: document(number) for number in range(8)}
    whole = sum(many.values(), AcceptanceStats())
    record = record_of(whole, 7, "validation", {"code": many})
    assert record["documents"] == 8
    assert record["error"] == pytest.approx(error_of(list(many.values())))
    assert record["sources"] == {"code": figures_of(list(many.values()))}
    assert record["sources"]["code"]["expected accepted length"] == pytest.approx(1.35)
    assert "sources" not in record_of(whole, 7, "validation")


def test_the_table_of_sources() -> None:
    lines = source_table({"code": {1: document(5)}, "chat": {2: document(9), 3: document(8)}}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["code", "1", "1.500", "±", "0.158", "50.0%"],
        ["chat", "2", "1.850", "±", "0.080", "85.0%"],
    ]


def test_counts_by_document_are_kept(tmp_path: Path) -> None:
    sources = {"code": {3: document(5), 12: document(7)}}
    write_documents(tmp_path, 40, sources)
    assert json.loads((tmp_path / "documents.json").read_text())["iteration"] == 40
    kept = read_documents(tmp_path)["code"]
    assert {number: (stats.offered_at, stats.accepted_at) for number, stats in kept.items()} == {
        3: ([10], [5]),
        12: ([10], [7]),
    }
    assert read_documents(tmp_path / "none") == {}
    (tmp_path / "documents.json").write_text('{"sources": {"code": 3}}')
    with pytest.raises(ValueError, match=r"documents.json is damaged .*; remove it, and evaluate again."):
        read_documents(tmp_path)
