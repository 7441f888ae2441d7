"""The report page in a browser: no errors, no requests, readable at any width, in both color schemes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import NAMES, Browser, find_browser

from megatron_mtp.cli import main as cli

COMMAND = find_browser()
pytestmark = pytest.mark.skipif(
    COMMAND is None,
    reason=f"no Chromium ({', '.join(NAMES)}) on the PATH; install one, or name one: "
    "CHROMIUM=/path/to/chromium pytest tests/extensions/report/test_report_browser.py",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert COMMAND is not None
    with Browser(COMMAND, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two runs of 50 steps with long names, one of which drafts and records how it was started."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [folder / name for name in ("one", "a-run-with-a-name-that-is-wider-than-a-telephone-is-<b>")]
    for run in runs:
        rows = [
            {"iteration": step, "split": split, "lm loss": 5 - step / 20, "mtp_1 loss": 5.5 - step / 20,
             "mtp_1 acceptance": step / 60, "mtp_1 conditional acceptance": step / 60,
             "expected accepted length": 1 + step / 60, "learning rate": 1.25e-05,
             "peak memory bytes": 3 * 2**30 + step}
            for step in range(10, 60, 10) for split in ("training", "validation")
        ]  # fmt: skip
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [{"drafted": [1, 2], "parents": [0, 1], "accepted": 1, "emitted": [1, 3]}] * 200
    drafts = {"config": {"method": "mtp"}, "figures": {"drafted": 400}, "pieces": {"1": "<script>"}}
    (runs[1] / "drafts.json").write_text(json.dumps({**drafts, "texts": [{"prompt": [4], "steps": steps}]}))
    start = {"date": "2026-01-31T12:00:00+00:00", "iteration": 0, "command": ["train", "a" * 300], "versions": {}}
    arguments = {"lr": 1e-3, "data_path": ["b" * 300]}
    (runs[1] / "run.json").write_text(json.dumps({"starts": [start], "arguments": arguments}))
    assert cli.main(["report", *map(str, runs), "--output", str(folder / "page.html")]) == 0
    return folder / "page.html"


def show(browser: Browser, page: Path, width: int = 1200, scheme: str = "light") -> None:
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.ask("Emulation.setEmulatedMedia", features=[feature])
    browser.open(page)


def test_the_page_renders_without_errors_or_network_requests(browser: Browser, page: Path) -> None:
    show(browser, page)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('.chart .main-svg').length") == 7 * 3  # plotly's layers
    shown = "[...document.querySelectorAll('.chart .scatterlayer .js-line')]"
    assert browser.evaluate(f"{shown}.length") == 7 * 4
    assert browser.evaluate(f"{shown}.every(l => l.getBoundingClientRect().width > 100)") is True
    assert browser.evaluate("document.querySelectorAll('.tokens del').length") == 200


WORDS = """[...document.querySelectorAll('body *')].filter(e => e.checkVisibility()
    && !['SCRIPT', 'STYLE'].includes(e.tagName)
    && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))"""
"""Elements that have their own text."""


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_is_readable_at_any_width(browser: Browser, page: Path, width: int) -> None:
    show(browser, page, width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    sizes = browser.evaluate(f"{WORDS}.map(e => parseFloat(getComputedStyle(e).fontSize))")
    assert len(sizes) > 100
    assert min(sizes) >= 11
    drawn = "[...document.querySelectorAll('.chart text')].map(t => t.getBoundingClientRect()).filter(a => a.width)"
    assert browser.evaluate(f"{drawn}.length") > 50
    assert browser.evaluate(f"{drawn}.every(a => a.left >= 0 && a.right <= {width})") is True


def test_the_check_detects_text_wider_than_the_page(browser: Browser, page: Path) -> None:
    show(browser, page, 400)
    browser.evaluate("document.querySelector('h1').style.whiteSpace = 'nowrap'")
    assert browser.evaluate("document.documentElement.scrollWidth") > 400


def test_the_switch_makes_axes_logarithmic(browser: Browser, page: Path) -> None:
    show(browser, page)
    kinds = "[...document.querySelectorAll('.chart')].map(c => c._fullLayout.yaxis.type)"
    assert browser.evaluate(kinds) == ["linear"] * 7
    browser.evaluate("document.querySelector('#log').click()")
    assert browser.evaluate(kinds) == ["log"] * 2 + ["linear"] * 3 + ["log", "linear"]


def test_light_and_dark_mode_have_different_colors(browser: Browser, page: Path) -> None:
    seen = []
    for scheme in ("light", "dark"):
        show(browser, page, scheme=scheme)
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        seen.append((ground, browser.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill")))
    assert seen == [("rgb(252, 252, 250)", "rgb(28, 28, 26)"), ("rgb(25, 25, 24)", "rgb(236, 235, 230)")]


def test_the_check_detects_console_errors_and_requests(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>console.error('planted')</script><img src='absent.png'>")
    browser.open(tmp_path / "bad.html")
    assert len(browser.complaints()) == 2
    assert len(browser.requests()) == 2
