"""`megatron-mtp check`: drafts of a folder, local or from a server, compared with the recorded values."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_models import make
from parrot import Parrot, Running, running, words

from megatron_mtp.cli import main as cli
from megatron_mtp.cli.check import _compared
from megatron_mtp.common.acceptance import RECORD, AcceptanceStats, record_of, resampled
from megatron_mtp.data.samples import seed_of
from megatron_mtp.data.tokenizer import train_bpe
from megatron_mtp.decoding.engine import Engine
from megatron_mtp.decoding.requests import Request

Run = Callable[..., tuple[int, str, str]]


def record(folder: Path, *acceptance: float) -> None:
    """Write a record with these acceptance rates by position, each out of 1000."""
    hits = [round(1000 * rate) for rate in acceptance]
    stats = AcceptanceStats(
        accepted_at=hits, reached_at=[1000, *hits[:-1]], offered_at=[1000] * len(hits), overlap_at=[1000.0] * len(hits)
    )
    (folder / RECORD).write_text(json.dumps(record_of(stats, 7, "validation")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a random GLM-4 MoE with two MTP layers, whose drafts are almost always wrong, and its tokenizer."""
    place = tmp_path_factory.mktemp("check")
    made = make(place / "exported", "glm4_moe", 2, changes={"vocab_size": 258, "max_position_embeddings": 64})
    train_bpe(["abc abd"], 258, place / "tokenizer")
    for file in (place / "tokenizer").iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


@pytest.fixture
def check(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    (tmp_path / "texts").mkdir()
    for number in range(10):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} is the number of this text of {'many ' * 9}words")

    def run(*flags: object) -> tuple[int, str, str]:
        given = [folder, "--text", tmp_path / "texts", "--prompts", 10, "--prompt-tokens", 20, "--max-new-tokens", 20]
        status = cli.main(["check", *map(str, (*given, *flags))])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


@pytest.mark.usefixtures("megatron")
def test_drafts_of_a_folder_are_compared_with_its_record(folder: Path, check: Run) -> None:
    record(folder, 0.0, 0.0)
    status, shown, said = check()
    assert status == 0, said
    assert shown.endswith("drafts are accepted as recorded.\n")
    record(folder, 0.8, 0.4)
    status, shown, _ = check("--json")
    assert status == 1
    found = json.loads(shown)
    assert (found["ok"], found["prompts"], found["documents"]) == (False, 10, 10)
    assert found["recorded acceptance"] == pytest.approx([0.8, 0.4])
    assert found["drafts accepted a step"] < 0.3
    assert found["drafts"] >= 64
    _, shown, _ = check()
    assert "fewer drafts are accepted than recorded, beyond the error and a tolerance of 5%: the text differs" in shown


@pytest.mark.usefixtures("megatron")
def test_each_prompt_is_continued_by_a_seed_of_its_own(
    folder: Path, check: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder, 0.0, 0.0)
    seeds, add = list[int](), Engine.add

    def kept(engine: Engine, request: Request) -> int:
        seeds.append(request.seed)
        return add(engine, request)

    monkeypatch.setattr(Engine, "add", kept)
    check("--seed", 5)
    assert seeds == [seed_of(5, number) for number in range(10)]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a server that accepts one or none of two drafts in turn: the first is right in 7 of the 13 steps of 20
    tokens.
    """
    with running(Parrot(), words(tmp_path_factory.mktemp("tokenizer"))) as served:
        yield served


@pytest.mark.parametrize(("recorded", "status"), [((0.53, 0.0), 0), ((0.5, 0.1), 1), ((0.56, 0.0), 0)])
def test_a_server_is_asked_what_it_accepts(
    recorded: tuple[float, ...], status: int, folder: Path, check: Run, parrot: Running
) -> None:
    """The last one is within the tolerance."""
    record(folder, *recorded)
    found, shown, said = check("--server", parrot.url, "--json")
    assert found == status, said
    assert json.loads(shown)["acceptance"] == pytest.approx([7 / 13, 0.0])
    assert json.loads(shown)["drafts"] == 10 * 13


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prompts", "0"], "--prompts is 0; give 1 or more"),
        (["--tolerance", "1"], "--tolerance is 1; give 0 or more, and less than 1."),
        (["--prompts", "60"], "--text has 40 prompts of 20 tokens, and 60 are needed; give more text"),
        (["--model", "x"], "--model was given without --server; leave it out."),
        (["--server", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9 for the list of models"),
    ],
)
def test_bad_input_is_rejected_with_a_clear_error(flags: list[str], says: str, folder: Path, check: Run) -> None:
    record(folder, 0.5, 0.2)
    status, shown, said = check(*flags)
    assert (status, shown, said.count("\n")) == (2, "", 1)
    assert says in said


def test_a_folder_without_a_record_is_refused(folder: Path, check: Run) -> None:
    (folder / RECORD).unlink(missing_ok=True)
    status, _, said = check()
    assert status == 2
    assert "has no mtp_acceptance.json to compare with; measure the checkpoint with megatron-mtp evaluate" in said


# --- the bootstrap ---------------------------------------------------------------------------------------------------


def of(accepted: int, drafts: int) -> AcceptanceStats:
    return AcceptanceStats(accepted_at=[accepted], offered_at=[drafts], reached_at=[drafts])


def test_the_standard_error_is_over_documents_not_drafts() -> None:
    """With all-or-nothing documents, a hundred drafts of one carry no more information than a single draft."""
    documents = [of(100 * (number % 2), 100) for number in range(64)]
    drawn_R1 = resampled(documents)
    assert drawn_R1.mean() == pytest.approx(0.5, abs=0.01)
    assert drawn_R1.std() == pytest.approx(0.5 / 8, rel=0.1)
    assert resampled([of(50, 100)] * 64).std() == 0
    assert np.array_equal(resampled(documents), drawn_R1)


@pytest.mark.parametrize(("recorded", "is_ok"), [(0.6, True), (0.7, False)])
def test_drafts_within_the_error_match_the_record(recorded: float, is_ok: bool) -> None:
    """Half of 64 documents accept all drafts: 0.5 with a standard error of 1 / 16."""
    documents = [of(100 * (number % 2), 100) for number in range(64)]
    args = Namespace(folder="folder", server=None, tolerance=0.0)
    assert _compared(args, [*range(64)], documents, [recorded])["ok"] == is_ok


def test_positions_are_products_and_short_drafts_count_where_they_are() -> None:
    groups: list[Any] = [
        AcceptanceStats(accepted_at=[8, 4], offered_at=[10, 10], reached_at=[10, 8]),
        AcceptanceStats(accepted_at=[8], offered_at=[10], reached_at=[10]),
    ]
    drawn_RD = resampled(groups, draws=200)
    assert drawn_RD[:, 0] == pytest.approx(0.8)
    assert set(drawn_RD[:, 1].round(6)) == {0.0, 0.4}
