"""The page of runs as a browser shows it: it says nothing, asks for nothing, draws its charts and spills nowhere."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import NAMES, Browser, find_browser

from megatron_mtp.command import line

COMMAND = find_browser()
pytestmark = pytest.mark.skipif(
    COMMAND is None,
    reason=f"no Chromium ({', '.join(NAMES)}) on the PATH; install one, or name one: "
    "CHROMIUM=/path/to/chromium pytest tests/functional/test_report_browser.py",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert COMMAND is not None
    with Browser(COMMAND, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 50 steps, one of which has drafted."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        rows = [
            {"iteration": step, "split": split, "lm loss": 5 - step / 20, "mtp_1 loss": 5.5 - step / 20,
             "mtp_1 acceptance": step / 60, "expected accepted length": 1 + step / 60}
            for step in range(10, 60, 10) for split in ("training", "validation")
        ]  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [{"drafted": [1, 2], "parents": [0, 1], "accepted": 1, "emitted": [1, 3]}] * 200
    texts = [{"prompt": [4], "steps": steps}]
    drafts = {"config": {"method": "mtp"}, "figures": {"drafted": 400}, "pieces": {"1": "word"}, "texts": texts}
    (folder / "two" / "drafts.json").write_text(json.dumps(drafts))
    assert line.main(["report", str(folder / "one"), str(folder / "two"), "--output", str(folder / "page.html")]) == 0
    return folder / "page.html"


def test_the_page_is_drawn_without_complaints_and_without_a_network(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('svg').length") == 4
    shown = "[...document.querySelectorAll('polyline')].every(l => l.getBoundingClientRect().width > 100)"
    assert browser.evaluate(shown) is True
    assert browser.evaluate("document.querySelectorAll('.tokens del').length") == 200
    drawn = "getComputedStyle(document.querySelector('polyline')).stroke"
    assert browser.evaluate(drawn) not in ("none", "rgb(0, 0, 0)")


@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_spills_over_the_window(browser: Browser, page: Path, width: int) -> None:
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    marks = "[...document.querySelectorAll('svg text')].every(t => { const a = t.getBoundingClientRect(), "
    marks += "b = t.ownerSVGElement.getBoundingClientRect(); return a.left >= b.left - 1 && a.right <= b.right + 1 })"
    assert browser.evaluate(marks) is True


def test_light_and_dark_have_colours_of_their_own(browser: Browser, page: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.ask("Emulation.setEmulatedMedia", features=[feature])
        browser.open(page)
        seen.append(browser.evaluate(ground))
    assert seen == ["rgb(252, 252, 250)", "rgb(25, 25, 24)"]


def test_the_check_hears_a_page_that_complains_and_asks(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>console.error('planted')</script><img src='absent.png'>")
    browser.open(tmp_path / "bad.html")
    assert len(browser.complaints()) == 2
    assert len(browser.requests()) == 2
