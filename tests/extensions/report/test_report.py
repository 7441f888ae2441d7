"""The report page: its contents, that it is a single file without requests, and errors for bad folders."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from megatron_mtp.cli import main as cli
from megatron_mtp.extensions.report.charts import COLORS
from megatron_mtp.extensions.report.charts import charts as drawn_charts
from megatron_mtp.extensions.report.page import SCRIPT, STYLE, page
from megatron_mtp.extensions.report.runs import MetricsRow, read_runs

VOID = {"meta", "br", "input"}
EVIL = "</script><script>alert(1)</script><b>"
CHAIN = {"drafted": [7, 9], "parents": [0, 1], "accepted": 1, "emitted": [7, 8]}
TREE = {"drafted": [7, 9, 5, None], "parents": [0, 0, 2, 3], "accepted": 2, "emitted": [9, 5, 6]}


class Page(HTMLParser):
    """Check that every tag is closed, in order; collect what the page names, prints and draws."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words, self.scripts = "", list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.words += data

    def charts(self) -> dict[str, dict[str, dict[int, Any]]]:
        """Return the points of each line, by title and line name."""
        titles = [str(one["aria-label"]).removesuffix(" over training steps") for one in self.of("div", "chart")]
        lines = [json.loads(text)["data"] for text in self.scripts[:-2]]
        return {
            title: {one["name"]: dict(zip(one["x"], one["y"], strict=True)) for one in of}
            for title, of in zip(titles, lines, strict=True)
        }

    def of(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        return [have for name, have in self.tags if name == tag and (kind is None or have.get("class") == kind)]


def rows(depths: int, offset: float = 0.0) -> list[dict[str, Any]]:
    made = []
    for step in range(10, 60, 10):
        losses = {"lm loss": 5 - step / 20 + offset, **{f"mtp_{d} loss": 5.5 - step / 20 for d in range(1, depths + 1)}}
        cost = {"step seconds": 0.25, "peak memory bytes": 3 * 2**30}
        made.append({"iteration": step, "split": "training", **losses, "learning rate": 1e-3 / step, **cost})
    rates = {f"mtp_{d} conditional acceptance": 0.75 for d in range(1, depths + 1)}
    rates |= {f"mtp_{d} acceptance": 0.75**d for d in range(1, depths + 1)}
    made.append({"iteration": 50, "split": "validation", **losses, **rates, "expected accepted length": 2.3125})
    return [*made, {"iteration": 50, "split": "test-code", "lm loss": 1.125}]


def started(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of a run that was started once and resumed at step 20."""
    first = {
        "date": "2026-01-31T12:00:00+00:00",
        "iteration": 0,
        "command": ["train", EVIL],
        "versions": {"torch": "2"},
    }
    again = {**first, "date": "2026-02-01T12:00:00+00:00", "iteration": 20}
    return {"starts": [first, again], "arguments": {"num_layers": 4, "lr": 1e-3, "rank": 0, **arguments}}


def drafts() -> dict[str, Any]:
    pieces = {"3": EVIL, "7": "<b>", "8": "&amp;", "9": "\n", "5": "five", "6": "six"}
    first = {"drafted": [], "parents": [], "accepted": 0, "emitted": [3]}
    texts = [{"prompt": [3, 4], "steps": [first, CHAIN, TREE]}]
    return {"config": {"method": EVIL}, "figures": {"drafted": 5, EVIL: EVIL}, "pieces": pieces, "texts": texts}


def a_run(folder: Path, depths: int = 2, offset: float = 0.0, drafted: bool = False, **arguments: Any) -> Path:
    folder.mkdir(parents=True)
    if arguments:
        (folder / "run.json").write_text(json.dumps(started(**arguments)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(depths, offset)))
    if drafted:
        (folder / "drafts.json").write_text(json.dumps(drafts()))
    return folder


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_a_run_has_its_charts_its_table_and_its_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run", drafted=True)
    assert report(folder) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    made = Page((folder / "report.html").read_text())
    charts = made.charts()
    assert {title: list(lines) for title, lines in charts.items()} == {
        "Loss": [f"{name}{of}" for name in ("trunk", "depth 1", "depth 2") for of in (" (training)", "")],
        "Acceptance": ["depth 1", "depth 2"],
        "Conditional acceptance": ["depth 1", "depth 2"],
        "Expected accepted length": ["expected accepted length"],
        "Learning rate": ["learning rate"],
        "Step seconds": ["step seconds"],
        "Peak memory": ["peak memory bytes"],
    }
    assert charts["Loss"]["depth 2"] == {50: 3.0}
    assert charts["Loss"]["trunk (training)"] == {10: 4.5, 20: 4.0, 30: 3.5, 40: 3.0, 50: 2.5}
    assert charts["Peak memory"]["peak memory bytes"][50] == 3.0
    for figure in ("lm loss (validation)2.5", "lm loss (test-code)1.125", "mtp_2 acceptance (validation)0.5625"):
        assert figure in made.words
    assert "peak memory bytes (training)3.00 GiB" in made.words
    rejected = ["step 1: rejected (id 9)", "step 2: rejected (id 7)"]
    assert [one["title"] for one in made.of("del") if one] == rejected
    own = [str(one["title"]) for one in made.of("span", "own") if "title" in one]
    assert [title.rsplit(" ")[-1] for title in own] == ["3)", "8)", "6)"]
    assert sorted(path.name for path in folder.iterdir()) == ["drafts.json", "metrics.jsonl", "report.html"]


def test_several_runs_share_one_chart_per_metric(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / "one"), a_run(tmp_path / "two", depths=3, offset=1.0)]
    assert report(*folders, folders[0], "--output", tmp_path / "both.html") == 0
    made = Page((tmp_path / "both.html").read_text())
    charts = made.charts()
    assert [title for title in charts if "Loss" in title] == [
        f"Loss: {of}" for of in "trunk,depth 1,depth 2,depth 3".split(",")
    ]
    lines = charts["Loss: trunk"]
    assert [name[-14:] for name in lines] == [
        "one (training)",
        str(folders[0])[-14:],
        "two (training)",
        str(folders[1])[-14:],
    ]
    assert [list(points.values())[-1] for points in lines.values()] == [2.5, 2.5, 3.5, 3.5]
    assert len(charts["Loss: depth 3"]) == 2
    assert f"{folders[0]}, {folders[1]} - megatron-mtp" in made.words


def test_a_headline_summarizes_a_run(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    made = Page(page(read_runs([folder])))
    said = "step 50, validation: trunk loss 2.500; acceptance 75.0 %, 56.2 % by depth; 2.31 tokens expected per forward"
    assert f"{folder}{said} pass of the trunk.Charts are" in made.words
    assert "No drafts were recorded." in made.words
    figures = {"accepted_length": 2.5, "tokens_per_second": 9.0, "speed_up": 1.4}
    (folder / "drafts.json").write_text(json.dumps({**drafts(), "config": {"method": "mtp"}, "figures": figures}))
    several = Page(page(read_runs([folder, a_run(tmp_path / "other", depths=1)]))).words
    assert "Decoding (mtp): 2.5 tokens per forward pass, 1.4 times as fast as plain decoding." in several
    assert f"{tmp_path}/other, step 50, validation: trunk loss 2.500; acceptance 75.0 % by depth;" in several
    assert "No drafts were recorded." not in several


def test_axes_have_titles_and_similar_charts_share_ranges(tmp_path: Path) -> None:
    runs = read_runs([a_run(tmp_path / "one"), a_run(tmp_path / "two", offset=1.0)])
    drawn = {title: figure.to_dict()["layout"] for _, title, figure in drawn_charts(runs)}
    assert {str(one["xaxis"]) for one in drawn.values()} == {str(drawn["Loss: trunk"]["xaxis"])}
    assert drawn["Loss: trunk"]["xaxis"]["title"] == {"text": "training step"}
    assert drawn["Loss: trunk"]["xaxis"]["range"] == [8.0, 52.0]
    losses = [drawn[f"Loss: {of}"]["yaxis"] for of in ("trunk", "depth 1", "depth 2")]
    assert [one["range"] for one in losses] == [[2.5 - 0.15, 5.5 + 0.15]] * 3, "from 2.5 of a trunk to 5.5 of the other"
    assert losses[0]["title"] == {"text": "nats per token"}
    assert drawn["Acceptance: depth 1"]["yaxis"]["range"] == [0.0, 1.0]
    assert all(one["yaxis"]["title"]["text"] for one in drawn.values())


def test_evaluations_on_several_sets_are_told_apart(tmp_path: Path) -> None:
    values = {"training": 1.5, "validation-code": 1.25, "validation-prose": 1.75}
    made = [json.dumps({"iteration": 7, "split": split, "lm loss": value}) for split, value in values.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(made))
    lines = Page(page(read_runs([tmp_path]))).charts()["Loss"]
    assert lines == {"trunk (training)": {7: 1.5}, "trunk, code": {7: 1.25}, "trunk, prose": {7: 1.75}}


def test_user_text_is_never_interpreted_as_html(tmp_path: Path) -> None:
    """Names of runs and metrics, commands, settings, prompts and draft tokens."""
    folder = a_run(tmp_path / "run" / EVIL, drafted=True, data_path=[EVIL])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 50, "split": f"validation-{EVIL}", f"{EVIL} loss": 1.0}) + "\n")
    for runs in (read_runs([folder]), read_runs([folder, a_run(tmp_path / "other", data_path=[1])])):
        made = Page(page(runs))
        assert not {"b", "a", "img", "iframe", "link"} & {tag for tag, _ in made.tags}
        assert made.scripts[-2:] == [get_plotlyjs(), SCRIPT]
        assert made.of("script")[:-2] == [{"type": "application/json"}] * len(made.of("div", "chart"))
        assert made.words.count("alert(1)") > 8
        names = [one["name"] for text in made.scripts[:-2] for one in json.loads(text)["data"]]
        assert any("alert(1)" in name for name in names)
        assert not any("<" in name for name in names)  # plotly draws some tags


def test_the_page_loads_no_resources_and_is_accessible(tmp_path: Path) -> None:
    text = page(read_runs([a_run(tmp_path / "run", drafted=True, lr=1)]))
    made = Page(text)
    assert not any(name in ("src", "href") or name.startswith("on") for _, have in made.tags for name in have)
    scripts = " ".join([r"'sha256-[\w+/]{43}='"] * 2)
    assert re.search(rf"default-src 'none'; style-src 'unsafe-inline'; script-src {scripts}\"", text)
    assert not re.search(r"url\(|@import", STYLE)
    assert made.of("html") == [{"lang": "en"}]
    assert all(one["role"] == "img" and one["aria-label"] for one in made.of("div", "chart"))
    assert all(one["aria-label"] for _, one in made.tags if "tabindex" in one)


def test_the_page_shows_how_runs_were_started_and_differ(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", odd=1, lr=1e-3)
    other = a_run(tmp_path / "other", odd=2, lr=2e-3, rank=3, more=[1, 2])
    made = Page(page(read_runs([one, other, a_run(tmp_path / "old")])))
    for told in (
        "first started2026-01-31 12:00:00+00:002026-01-31",
        "resumed2026-02-01 12:00:00+00:00 at step 20",
        "torch22",
        f"argument that differs{one}{other}lr0.0010.002odd12more[1, 2]All arguments",
        "num_layers44",
        "rank03",
    ):
        assert told in made.words, told
    alone = page(read_runs([one]))
    assert "argument that differs" not in alone
    assert "No run has a run.json" in page(read_runs([tmp_path / "old"]))


def test_a_nan_loss_leaves_a_gap_and_is_in_the_table(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        for step, value in ((60, math.nan), (70, math.inf), (80, 1.7e308)):
            file.write(
                json.dumps({"iteration": step, "split": "training", "lm loss": value, "grad norm": -math.inf}) + "\n"
            )
    made = Page(page(read_runs([folder])))
    points = made.charts()["Loss"]["trunk (training)"]
    assert [points[step] for step in (50, 60, 70, 80)] == [2.5, None, None, 1.7e308]
    assert "grad norm (training)-inf" in made.words


def test_paths_of_a_tree() -> None:
    assert MetricsRow(**CHAIN).rejected() == [9]  # type: ignore[arg-type]
    assert MetricsRow(**TREE).rejected() == [7]  # type: ignore[arg-type]


def _contrast(one: str, other: str) -> float:
    """Return WCAG 2's contrast ratio."""

    def light(color: str) -> float:
        channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_colors_have_enough_contrast_in_light_and_dark_mode() -> None:
    """WCAG requires contrasts of 3 for graphics and 4.5 for text."""
    schemes = [dict(re.findall(r"--(\w+): (#\w+)", part)) for part in STYLE.split("prefers-color-scheme: dark")]
    assert len(schemes) == 2
    for scheme in schemes:
        assert min(_contrast(color, scheme["paper"]) for color in COLORS) >= 3
        assert min(_contrast(scheme[name], scheme["paper"]) for name in ("ink", "soft", "bad")) >= 4.5
        assert _contrast(scheme["ink"], scheme["good"]) >= 4.5


BROKEN_DRAFTS: dict[str, Any] = {
    "no object": [],
    "no texts": {"config": None, "figures": {}, "pieces": {}},
    "a parent below": {**drafts(), "texts": [{"prompt": [], "steps": [{**CHAIN, "parents": [2, 0]}]}]},
    "too few parents": {**drafts(), "texts": [{"prompt": [], "steps": [{**CHAIN, "parents": [0]}]}]},
    "text for an id": {**drafts(), "texts": [{"prompt": ["3"], "steps": []}]},
    "half an id": {**drafts(), "texts": [{"prompt": [0.5], "steps": []}]},
    "pieces that are not texts": {**drafts(), "pieces": {"3": ["a"]}},
    "too many accepted": {**drafts(), "texts": [{"prompt": [], "steps": [{**CHAIN, "accepted": 3}]}]},
}


@pytest.mark.parametrize("broken", BROKEN_DRAFTS.values(), ids=BROKEN_DRAFTS.keys())
def test_damaged_drafts_are_named(broken: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "drafts.json").write_text(json.dumps(broken))
    assert report(folder) == 2
    assert f"{folder}/drafts.json is damaged" in _one_sentence(capsys)


def test_folders_without_valid_metrics_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = a_run(tmp_path / "damaged")
    (damaged / "metrics.jsonl").write_text("[1]")
    (tmp_path / "empty").mkdir()
    for folder, said in (
        ("nowhere", "has no metrics.jsonl"),
        ("empty", "has no metrics.jsonl"),
        ("damaged", "in line 1;"),
    ):
        assert report(a_run(tmp_path / f"good-{folder}"), tmp_path / folder, "--output", tmp_path / "page.html") == 2
        assert said in _one_sentence(capsys)
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(SystemExit, match="2"):
        report("")
    assert "empty; give a path" in _one_sentence(capsys)


def test_a_failed_write_keeps_the_old_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path / "run")
    assert report(folder, "--output", tmp_path / "nowhere" / "page.html") == 2
    assert "cannot be written (No such file or directory); name another file with --output." in _one_sentence(capsys)
    (tmp_path / "page.html").write_text("old")

    def full(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text[:100].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert report(folder, "--output", tmp_path / "page.html") == 2
    assert "No space left on device" in _one_sentence(capsys)
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@pytest.mark.parametrize("package", ["plotly", "pydantic"])
def test_a_missing_package_error_names_the_extra(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("plotly", "megatron_mtp.extensions.report."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert report(a_run(tmp_path / "run")) == 2
    assert "pip install 'megatron-mtp[report]'" in _one_sentence(capsys)


def _one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("megatron-mtp report: error: ")
    assert said.err.count("\n") == 1
    return said.err
