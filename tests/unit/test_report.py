"""The page of runs: what it shows, that it is one file which asks for nothing, and what bad folders are answered."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_mtp.cli import main as cli
from megatron_mtp.report.charts import MOST_POINTS, Chart, Series, compact, figure, log_ticks, smoothed, thinned, ticks
from megatron_mtp.report.drafts import by_position, reach, rejected
from megatron_mtp.report.page import STYLE, page
from megatron_mtp.report.panels import charts
from megatron_mtp.report.runs import MOST, read_runs

VOID = {"meta", "br", "input"}
CHAIN = {"drafted": [7, 9], "parents": [0, 1], "accepted": 1, "emitted": [7, 8]}
TREE = {"drafted": [7, 9, 5, None], "parents": [0, 0, 2, 3], "accepted": 2, "emitted": [9, 5, 6]}


class Page(HTMLParser):
    """Every tag that opens is closed, in order; what the page names and says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words, self.text = "", text
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

    def values(self) -> dict[str, list[list[Any]]]:
        """What the script reads out: the points of every line, those of lines with one name together."""
        lines: dict[str, list[list[Any]]] = {}
        for text in re.findall(r'<script type="application/json">(.*?)</script>', self.text):
            for one in json.loads(text):
                lines.setdefault(one["name"], []).extend(one["points"])
        return lines

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def rows(depths: int, offset: float = 0.0) -> list[dict[str, Any]]:
    made = []
    for step in range(10, 60, 10):
        losses = {"lm loss": 5 - step / 20 + offset, **{f"mtp_{d} loss": 5.5 - step / 20 for d in range(1, depths + 1)}}
        cost = {"step seconds": 0.25, "peak memory bytes": 3 * 2**30}
        optimizer = {"learning rate": 1e-3 / step, "grad norm": 2.0}
        made.append({"iteration": step, "split": "training", **losses, **optimizer, **cost})
    rates = {f"mtp_{d} {name}": 0.75 for d in range(1, depths + 1) for name in ("conditional acceptance", "overlap")}
    rates |= {f"mtp_{d} acceptance": 0.75**d for d in range(1, depths + 1)}
    return [*made, {"iteration": 50, "split": "validation", **losses, **rates, "expected accepted length": 2.3125}]


def started(**arguments: Any) -> dict[str, Any]:
    """Started once and resumed at step 20."""
    date, versions = "2026-01-31T12:00:00+00:00", {"megatron-mtp": "0.1.0", "torch": "2.11.0"}
    first = {
        "date": date,
        "iteration": 0,
        "command": ["train", "--lr", "1", "--data-path", "<a> b"],
        "versions": versions,
    }
    again = {**first, "date": "2026-02-01T12:00:00+00:00", "iteration": 20}
    return {"starts": [first, again], "arguments": {"num_layers": 4, "lr": 1e-3, "rank": 0, "odd": 1, **arguments}}


def drafts() -> dict[str, Any]:
    pieces = {"3": "def ", "7": "<b>", "8": "&amp;", "9": "\n", "5": "five", "6": "six"}
    first = {"drafted": [], "parents": [], "accepted": 0, "emitted": [3]}
    texts = [{"prompt": [3, 4], "steps": [first, CHAIN, TREE]}]
    figures = {"target_forwards": 3, "accepted_length": 2.0, "accepted_per_position": [1.0, 0.5]}
    return {"config": {"method": "mtp"}, "figures": figures, "pieces": pieces, "texts": texts}


def a_run(folder: Path, depths: int = 2, offset: float = 0.0, drafted: bool = False, **arguments: Any) -> Path:
    folder.mkdir()
    if arguments:
        (folder / "run.json").write_text(json.dumps(started(**arguments)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(depths, offset)))
    if drafted:
        (folder / "drafts.json").write_text(json.dumps(drafts()))
    return folder


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_a_run_has_its_charts_its_table_and_its_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run<1>", drafted=True)
    assert report(folder) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    made = Page((folder / "report.html").read_text())
    assert [one["aria-label"] for one in made.of("div") if one.get("role") == "img"] == [
        f"{title} over training steps: {lines}"
        for title, lines in (
            ("Loss", "trunk, depth 1, depth 2"),
            ("Acceptance", "depth 1, depth 2"),
            ("Conditional acceptance", "depth 1, depth 2"),
            ("Overlap", "depth 1, depth 2"),
            ("Expected accepted length", "expected accepted length"),
            ("Learning rate", "learning rate"),
            ("Grad norm", "grad norm"),
            ("Step seconds", "step seconds"),
            ("Peak memory", "peak memory bytes"),
        )
    ]
    assert all(name in made.words for name in ("2.3125", "0.5625", "0.2500", "3.00 GiB", "2e-05"))
    values = made.values()
    assert [50, 1.0, "3"] in values["depth 2"]
    assert [10, 0.0, "5"] in values["depth 2 (training)"]
    assert values["peak memory bytes"][-1] == [50, 1.0, "3"]
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
    made_page = Page((folder / "report.html").read_text())
    assert [made_page.words.count(f"lm loss ({split})") for split in values] == [1, 1, 1, 1]
    assert "1.1250" in made_page.words
    assert {name: points[0][2] for name, points in made_page.values().items()} == {
        "trunk": "1.5",
        "trunk, code": "1.25",
        "trunk, prose": "1.75",
    }


def test_a_run_of_before_evaluations_had_names_is_read(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace("validation", "evaluation"))
    assert report(folder) == 0
    made = Page((folder / "report.html").read_text())
    assert "mtp_2 acceptance (evaluation)" in made.words
    assert [50, 0.0, "0.5625"] in made.values()["depth 2"]


def test_a_run_of_before_acceptances_had_two_names_is_read(tmp_path: Path) -> None:
    """What such a file calls acceptance is the conditional one."""
    folder = tmp_path / "run"
    folder.mkdir()
    old = {"mtp_1 acceptance": 0.5, "mtp_2 acceptance": 0.25, "mtp_1 overlap": 0.4, "expected accepted length": 1.625}
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 7, "split": "validation", "lm loss": 1.0, **old}))
    (run,) = read_runs([folder])
    read = {key: run.last("validation", key) for key in run.figures() if "acceptance" in key}
    assert read == {
        "mtp_1 acceptance": 0.5,
        "mtp_2 acceptance": 0.125,
        "mtp_1 conditional acceptance": 0.5,
        "mtp_2 conditional acceptance": 0.25,
    }
    assert "which runs of earlier versions did not write" in Page(page([run])).words


def test_several_runs_stand_on_one_chart_a_figure(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / "one"), a_run(tmp_path / "two", depths=3, offset=1.0)]
    assert report(*folders, "--output", tmp_path / "both.html") == 0
    made = Page((tmp_path / "both.html").read_text())
    assert all(f"Loss: {name}" in made.words for name in ("trunk", "depth 1", "depth 2", "depth 3"))
    assert f"{folders[0]}, {folders[1]} - megatron-mtp" in made.words
    assert len([one for one in made.of("figure") if "chart" in str(one.get("class"))]) == 4 + 3 + 3 + 3 + 1 + 4
    assert [50, 1.0, "2.5"] in made.values()[str(folders[0])]
    assert [50, 1.0, "3.5"] in made.values()[str(folders[1])]


def test_the_page_asks_for_nothing_and_can_be_read_aloud(tmp_path: Path) -> None:
    text = page(read_runs([a_run(tmp_path / "run <script>", drafted=True, split="<b>")]))
    made = Page(text)
    assert not {"link", "img", "iframe", "object", "b"} & {tag for tag, _ in made.tags}
    assert not any(name in ("src", "href") or name.startswith("on") for _, a in made.tags for name in a)
    assert not any(part in text for part in ("://", "url(", "@import"))
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='\"", text)
    assert [one for one in made.of("script") if one != {"type": "application/json"}] == [{}]
    assert made.of("html") == [{"lang": "en"}]
    assert all(one["aria-hidden"] == "true" for one in made.of("svg"))
    assert all(one["role"] == "img" and one["aria-label"] for one in made.of("div") if one.get("class") == "plot")
    assert all(one["aria-label"] for _, one in made.tags if "tabindex" in one)
    assert len(made.of("caption")) == len(made.of("table")) == 4


def test_how_runs_were_started_and_where_they_differ(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", odd=1, lr=1e-3)
    other = a_run(tmp_path / "other", odd=2, lr=2e-3, rank=3, more=[1, 2])
    made = Page(page(read_runs([one, other, a_run(tmp_path / "old")])))
    for told in (
        "first started2026-01-31 12:00:00+00:002026-01-31",
        "resumed2026-02-01 12:00:00+00:00 at step 20",
        "megatron-mtp0.1.00.1.0",
        "num layers44",
        "lr0.0010.002",
        "Other settings that differodd12more[1, 2]",
        "train --lr 1 --data-path '<a> b'",
    ):
        assert told in made.words, told
    assert len([row for row in made.of("tr") if row.get("class") == "differs"]) == 3
    assert "rank" not in made.words
    alone = Page(page(read_runs([one])))
    assert "Other settings" not in alone.words
    assert "num layers4" in alone.words


DAMAGED_STARTS: dict[str, Any] = {
    "no object": [],
    "no starts": {"starts": [], "arguments": {}},
    "no arguments": {"starts": started()["starts"]},
    "no date": {"starts": [{**started()["starts"][0], "date": "today"}], "arguments": {}},
    "no words": {"starts": [{**started()["starts"][0], "command": [1]}], "arguments": {}},
    "no step": {"starts": [{**started()["starts"][0], "iteration": "1"}], "arguments": {}},
}


@pytest.mark.parametrize("broken", DAMAGED_STARTS.values(), ids=DAMAGED_STARTS.keys())
def test_a_damaged_start_is_named(broken: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps(broken))
    assert report(folder) == 2
    assert f"{folder}/run.json is damaged" in _one_sentence(capsys)


def test_a_loss_that_is_no_number_leaves_a_gap_and_stands_in_the_table(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    broken = {"iteration": 60, "split": "training", "lm loss": math.nan, "mtp_1 loss": 1e30}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(broken) + "\n")
    made = Page(page(read_runs([folder])))
    assert "lm loss (training)nan" in made.words
    assert not any("nan" in str(value) for _, a in made.tags for value in a.values())
    assert [50, 0.8, "2.5"] in made.values()["trunk"]


@pytest.mark.parametrize("value", [0.0, -3.0, 5e-324, 1e-200, 1e99, -1e99, 1e101, 1.7e308, 2**63 - 1, 1.0 + 2**-52])
def test_every_number_can_be_drawn(value: float, tmp_path: Path) -> None:
    """On both kinds of axes, alone and beside an ordinary one."""
    made = [
        {"iteration": 10 + n, "split": "training", "lm loss": v, "grad norm": value} for n, v in enumerate((1.0, value))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, made)))
    drawn = Page(page(read_runs([tmp_path])))
    lines = [one["points"] for one in drawn.of("polyline")]
    assert lines
    assert all(0 <= float(place) <= 1000 for line in lines for place in re.split("[ ,]", str(line)) if place)
    assert len(drawn.values()["trunk"]) == (1 if abs(value) > MOST else 2)


def test_a_depth_has_one_colour_on_all_charts(tmp_path: Path) -> None:
    loss, acceptance, *_ = charts(read_runs([a_run(tmp_path / "run")]))
    assert {(one.name, one.colour) for one in loss.series} == {("trunk", 0), ("depth 1", 1), ("depth 2", 2)}
    assert {(one.name, one.colour) for one in acceptance.series} == {("depth 1", 1), ("depth 2", 2)}


def test_both_kinds_of_axes_and_smoothed_lines() -> None:
    """Training is drawn four times, evaluations twice; 1, 10, 100 are evenly spaced on the logarithmic axis."""
    points = [(0, 1.0), (1, 10.0), (2, 100.0)]
    both = Chart("Loss", "nats", [Series("a", 0, points), Series("a", 0, points, training=True)], logarithmic=True)
    lines = [str(one["points"]) for one in Page(figure(both)).of("polyline")]
    assert len(lines) == 2 * 3
    assert "0.0,1000.0 500.0,500.0 1000.0,0.0" in lines
    alone = Chart("Loss", "nats", [Series("a", 0, [(0, -1.0), (1, 0.0)])], logarithmic=True)
    assert "view log" not in figure(alone)  # nothing is positive
    total = [1.0, 1 * 0.9 + 10, (1 * 0.9 + 10) * 0.9 + 100]
    weights = [1.0, 1.9, 2.71]
    expected = [value / weight for value, weight in zip(total, weights, strict=True)]
    assert [value for _, value in smoothed(points)] == pytest.approx(expected)


def _luminance(colour: str) -> list[float]:
    return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def _contrast(line: str, paper: str, opacity: float) -> float:
    """WCAG 2's, of a line that lets the paper through."""
    blended = [opacity * a + (1 - opacity) * b for a, b in zip(_luminance(line), _luminance(paper), strict=True)]

    def light(channels: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(blended), light(_luminance(paper))))
    return (high + 0.05) / (low + 0.05)


def test_lines_of_training_are_seen_on_light_and_dark_paper() -> None:
    """A contrast of 3 is what WCAG asks of graphics."""
    found = re.search(r"\.training polyline \{[^}]*opacity: ([.\d]+)", STYLE)
    assert found
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in STYLE.split("prefers-color-scheme: dark"))
    for scheme in (light, dark):
        assert min(_contrast(scheme[f"s{n}"], scheme["paper"], float(found[1])) for n in range(8)) >= 3
    assert _contrast(dark["s4"], dark["paper"], 0.3) < 3
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\d+ )?([.\d]+)px", STYLE)]
    assert len(sizes) > 5
    assert min(sizes) >= 11


def test_acceptance_by_position_is_from_the_start_and_given_the_earlier_drafts() -> None:
    """Three drafts of two tokens and one of one, of which 2, 1, 0 and 1 were accepted."""
    two, one = {"drafted": [7, 9], "parents": [0, 1]}, {"drafted": [7], "parents": [0]}
    steps = [two | {"accepted": 2}, two | {"accepted": 1}, two | {"accepted": 0}, one | {"accepted": 1}]
    rows = re.findall(r"<tr>(.*?)</tr>", by_position([{"steps": steps}]))
    cells = [re.findall(r">([^<]+)</t[hd]>", row) for row in rows]
    assert cells == [
        ["position", "drafted", "accepted", "acceptance", "conditional acceptance"],
        ["1", "4", "3", "75.0%", "75.0%"],
        ["2", "3", "1", "33.3%", "50.0%"],
    ]


def test_paths_of_a_tree() -> None:
    assert (reach(CHAIN), rejected(CHAIN)) == (2, [9])
    assert (reach(TREE), rejected(TREE)) == (2, [7])


def test_round_marks_and_thinned_lines() -> None:
    assert ticks(0.3, 2.1) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert ticks(1, 3, whole=True) == [1, 2, 3]
    assert ticks(0.0, 0.0)[0] == 0
    assert log_ticks(0.3, 2.1) == pytest.approx([0.2, 0.5, 1, 2, 5])
    assert log_ticks(1, 1) == [1, 2]
    assert log_ticks(3e-7, 40) == pytest.approx([1e-7, 1e-5, 1e-3, 1e-1, 10, 1000])
    assert [compact(step) for step in (0, 1500, 20000, 1500000, 2e7)] == ["0", "1500", "20k", "1500k", "20M"]
    points = [(step, float(step)) for step in range(10 * MOST_POINTS + 2)]
    kept = thinned(points)
    assert kept[-1] == points[-1]
    assert MOST_POINTS / 2 < len(kept) <= MOST_POINTS + 1


DAMAGED = {
    "half a line": '{"iteration": 60, "spl',
    "no object": "[1]",
    "no step": '{"split": "training", "lm loss": 1.0}',
    "no number": '{"iteration": 1, "split": "training", "lm loss": "1"}',
    "no step of a run": '{"iteration": -1, "split": "training", "lm loss": 1.0}',
    "400 digits": '{"iteration": 1, "split": "training", "lm loss": ' + "9" * 400 + "}",
    "5,000 digits": '{"iteration": 1, "split": "training", "lm loss": ' + "9" * 5000 + "}",
    "a step of 400 digits": '{"iteration": ' + "9" * 400 + ', "split": "training", "lm loss": 1.0}',
    "too deep": "[" * 100000,
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
    "pieces that are no texts": {**drafts(), "pieces": {"3": ["a"]}},
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
