"""The page of runs: what it shows, that it is one file which asks for nothing, and what bad folders are answered."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_mtp.command import line
from megatron_mtp.report.charts import MOST_POINTS, thinned, ticks
from megatron_mtp.report.drafts import reach, rejected
from megatron_mtp.report.page import page
from megatron_mtp.report.panels import charts
from megatron_mtp.report.runs import read_runs

VOID = {"meta", "br"}
CHAIN = {"drafted": [7, 9], "parents": [0, 1], "accepted": 1, "emitted": [7, 8]}
TREE = {"drafted": [7, 9, 5, None], "parents": [0, 0, 2, 3], "accepted": 2, "emitted": [9, 5, 6]}


class Page(HTMLParser):
    """Every tag that opens is closed, in order; what the page names and says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def rows(depths: int, offset: float = 0.0) -> list[dict[str, Any]]:
    made = []
    for step in range(10, 60, 10):
        losses = {"lm loss": 5 - step / 20 + offset, **{f"mtp_{d} loss": 5.5 - step / 20 for d in range(1, depths + 1)}}
        cost = {"step seconds": 0.25, "peak memory bytes": 3 * 2**30}
        made.append({"iteration": step, "split": "training", **losses, **cost})
    rates = {f"mtp_{d} {name}": 0.75 for d in range(1, depths + 1) for name in ("acceptance", "overlap")}
    return [*made, {"iteration": 50, "split": "validation", **losses, **rates, "expected accepted length": 2.3125}]


def drafts() -> dict[str, Any]:
    pieces = {"3": "def ", "7": "<b>", "8": "&amp;", "9": "\n", "5": "five", "6": "six"}
    first = {"drafted": [], "parents": [], "accepted": 0, "emitted": [3]}
    texts = [{"prompt": [3, 4], "steps": [first, CHAIN, TREE]}]
    figures = {"target_forwards": 3, "accepted_length": 2.0, "accepted_per_position": [1.0, 0.5]}
    return {"config": {"method": "mtp"}, "figures": figures, "pieces": pieces, "texts": texts}


def a_run(folder: Path, depths: int = 2, offset: float = 0.0, drafted: bool = False) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(depths, offset)))
    if drafted:
        (folder / "drafts.json").write_text(json.dumps(drafts()))
    return folder


def report(*arguments: object) -> int:
    return line.main(["report", *map(str, arguments)])


def test_a_run_has_its_charts_its_table_and_its_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run<1>", drafted=True)
    assert report(folder) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    made = Page((folder / "report.html").read_text())
    titles = "Loss|Acceptance given the earlier depths|Expected accepted length|Time of a step|Peak memory".split("|")
    assert all(title in made.words for title in titles)
    assert all(name in made.words for name in ("trunk", "depth 1", "depth 2", "2.3125", "0.2500", "3.00 GiB"))
    assert "depth 2\nstep 50: 3" in made.words  # what the pointer shows
    assert "<b>" in made.words
    assert [a["title"] for a in made.of("del") if a] == [
        "step 1: draft, rejected (id 9)",
        "step 2: draft, rejected (id 7)",
    ]
    own = [a["title"] for a in made.of("span") if a.get("class") == "own" and "title" in a]
    assert [title.rsplit(" ")[-1] for title in own if title] == ["3)", "8)", "6)"]
    assert sorted(path.name for path in folder.iterdir()) == ["drafts.json", "metrics.jsonl", "report.html"]


def test_evaluations_on_several_sets_and_on_test_data_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    values = {"training": 1.5, "validation-code": 1.25, "validation-prose": 1.75, "test-code": 1.125}
    made = [json.dumps({"iteration": 7, "split": split, "lm loss": value}) for split, value in values.items()]
    (folder / "metrics.jsonl").write_text("\n".join(made))
    assert report(folder) == 0
    words = Page((folder / "report.html").read_text()).words
    assert "trunk, code" in words
    assert "trunk, prose" in words
    assert [words.count(f"lm loss ({split})") for split in values] == [1, 1, 1, 1]
    assert "1.1250" in words
    assert "step 7: 1.125" not in words


def test_a_run_of_before_evaluations_had_names_is_read(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace("validation", "evaluation"))
    assert report(folder) == 0
    words = Page((folder / "report.html").read_text()).words
    assert "mtp_2 acceptance (evaluation)" in words
    assert "step 50: 0.75" in words


def test_several_runs_stand_on_one_chart_a_figure(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / "one"), a_run(tmp_path / "two", depths=3, offset=1.0)]
    assert report(*folders, "--output", tmp_path / "both.html") == 0
    made = Page((tmp_path / "both.html").read_text())
    assert all(f"Loss: {name}" in made.words for name in ("trunk", "depth 1", "depth 2", "depth 3"))
    assert f"{folders[0]}, {folders[1]} - megatron-mtp" in made.words
    assert len(made.of("svg")) == 4 + 3 + 3 + 3
    assert "step 50: 2.5" in made.words
    assert "step 50: 3.5" in made.words


def test_the_page_asks_for_nothing_and_can_be_read_aloud(tmp_path: Path) -> None:
    text = page(read_runs([a_run(tmp_path / "run", drafted=True)]))
    made = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in made.tags}
    assert not any(name in ("src", "href", "style") or name.startswith("on") for _, a in made.tags for name in a)
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert made.of("html") == [{"lang": "en"}]
    ids = {a["id"] for _, a in made.tags if "id" in a}
    for chart in made.of("svg"):
        assert chart["role"] == "img"
        assert set(str(chart["aria-labelledby"]).split()) <= ids
    assert len(made.of("caption")) == len(made.of("table")) == 3
    assert len(ids) == 2 * len(made.of("svg"))


def test_a_loss_that_is_no_number_leaves_a_gap_and_stands_in_the_table(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    broken = {"iteration": 60, "split": "training", "lm loss": math.nan, "mtp_1 loss": 1e30}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(broken) + "\n")
    made = Page(page(read_runs([folder])))
    assert "lm loss (training)nan" in made.words
    assert not any("nan" in str(a) for _, a in made.tags)


def test_a_depth_has_one_colour_on_all_charts(tmp_path: Path) -> None:
    loss, acceptance, *_ = charts(read_runs([a_run(tmp_path / "run")]))
    assert {(one.name, one.colour) for one in loss.series} == {("trunk", 0), ("depth 1", 1), ("depth 2", 2)}
    assert {(one.name, one.colour) for one in acceptance.series} == {("depth 1", 1), ("depth 2", 2)}


def test_paths_of_a_tree() -> None:
    assert (reach(CHAIN), rejected(CHAIN)) == (2, [9])
    assert (reach(TREE), rejected(TREE)) == (2, [7])


def test_round_marks_and_thinned_lines() -> None:
    assert ticks(0.3, 2.1) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert ticks(1, 3, whole=True) == [1, 2, 3]
    assert ticks(0.0, 0.0)[0] == 0
    points = [(step, float(step)) for step in range(10 * MOST_POINTS + 2)]
    kept = thinned(points)
    assert kept[-1] == points[-1]
    assert MOST_POINTS / 2 < len(kept) <= MOST_POINTS + 1


DAMAGED = {
    "half a line": '{"iteration": 60, "spl',
    "no object": "[1]",
    "no step": '{"split": "training", "lm loss": 1.0}',
    "no number": '{"iteration": 1, "split": "training", "lm loss": "1"}',
    "another split": '{"iteration": 1, "split": "tests", "lm loss": 1.0}',
}


@pytest.mark.parametrize("line_", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_named(line_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line_)
    assert report(folder) == 2
    assert f"{folder}/metrics.jsonl is damaged in line 7;" in _one_sentence(capsys)
    assert not (folder / "report.html").exists()


BROKEN_DRAFTS: dict[str, Any] = {
    "no object": [],
    "no texts": {"config": None, "figures": {}, "pieces": {}},
    "a parent below": {**drafts(), "texts": [{"prompt": [], "steps": [{**CHAIN, "parents": [2, 0]}]}]},
    "text for an id": {**drafts(), "texts": [{"prompt": ["3"], "steps": []}]},
    "too many accepted": {**drafts(), "texts": [{"prompt": [], "steps": [{**CHAIN, "accepted": 3}]}]},
}


@pytest.mark.parametrize("broken", BROKEN_DRAFTS.values(), ids=BROKEN_DRAFTS.keys())
def test_damaged_drafts_are_named(broken: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "drafts.json").write_text(json.dumps(broken))
    assert report(folder) == 2
    assert f"{folder}/drafts.json is damaged" in _one_sentence(capsys)


def test_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "metrics.jsonl").touch()
    for folder, said in (("nowhere", "is no folder"), ("empty", "has no metrics.jsonl"), ("none", "is empty")):
        assert report(a_run(tmp_path / f"good-{folder}"), tmp_path / folder, "--output", tmp_path / "page.html") == 2
        assert said in _one_sentence(capsys)
    assert not (tmp_path / "page.html").exists()


def test_an_output_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path / "run")
    assert report(folder, "--output", tmp_path / "nowhere" / "page.html") == 2
    assert "cannot be written (No such file or directory); name another file with --output." in _one_sentence(capsys)
    assert report(folder, "--output", tmp_path) == 2
    assert "cannot be written" in _one_sentence(capsys)
    (tmp_path / "page.html").write_text("old")

    def full(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text[:100].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert report(folder, "--output", tmp_path / "page.html") == 2
    assert "No space left on device" in _one_sentence(capsys)
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def _one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("megatron-mtp report: error: ")
    assert said.err.count("\n") == 1
    return said.err
