"""The page of runs as a browser shows it: no complaints, no requests, readable at any width, values by every means."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import NAMES, Browser, find_browser

from megatron_mtp.cli import main as cli

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
    """Two runs of 50 steps, one of which has drafted and says how it was started."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        rows = [
            {"iteration": step, "split": split, "lm loss": 5 - step / 20, "mtp_1 loss": 5.5 - step / 20,
             "mtp_1 acceptance": step / 60, "mtp_1 conditional acceptance": step / 60,
             "expected accepted length": 1 + step / 60, "learning rate": 1.25e-05,
             "peak memory bytes": 3 * 2**30 + step}
            for step in range(10, 60, 10) for split in ("training", "validation")
        ]  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [{"drafted": [1, 2], "parents": [0, 1], "accepted": 1, "emitted": [1, 3]}] * 200
    texts = [{"prompt": [4], "steps": steps}]
    drafts = {"config": {"method": "mtp"}, "figures": {"drafted": 400}, "pieces": {"1": "word"}, "texts": texts}
    (folder / "two" / "drafts.json").write_text(json.dumps(drafts))
    start = {"date": "2026-01-31T12:00:00+00:00", "iteration": 0, "command": ["train", "a" * 300], "versions": {}}
    arguments = {"lr": 1e-3, "data_path": ["b" * 300]}
    (folder / "two" / "run.json").write_text(json.dumps({"starts": [start], "arguments": arguments}))
    assert cli.main(["report", str(folder / "one"), str(folder / "two"), "--output", str(folder / "page.html")]) == 0
    return folder / "page.html"


def press(browser: Browser, key: str) -> None:
    for kind in ("rawKeyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])


KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9}


def show(browser: Browser, page: Path, width: int = 1200, scheme: str = "light") -> None:
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.ask("Emulation.setEmulatedMedia", features=[feature])
    browser.open(page)


def test_the_page_is_drawn_without_complaints_and_without_a_network(browser: Browser, page: Path) -> None:
    show(browser, page)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('figure.chart').length") == 7
    shown = "[...document.querySelectorAll('.linear polyline:not(.smooth)')]"
    assert browser.evaluate(f"{shown}.every(l => l.getBoundingClientRect().width > 100)") is True
    assert browser.evaluate("document.querySelectorAll('.tokens del').length") == 200
    drawn = "getComputedStyle(document.querySelector('polyline')).stroke"
    assert browser.evaluate(drawn) not in ("none", "rgb(0, 0, 0)")


WORDS = """[...document.querySelectorAll('body *')].filter(e => e.checkVisibility()
    && !['SCRIPT', 'STYLE'].includes(e.tagName)
    && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))"""
"""Elements with text of their own."""

OVERLAPS = """[...document.querySelectorAll('.x, .view:not(.log) .y')].flatMap(axis => {
    const seen = [...axis.children].filter(s => s.checkVisibility()).map(s => s.getBoundingClientRect());
    return seen.slice(1).filter((b, n) => b.left < seen[n].right && b.right > seen[n].left
        && b.top < seen[n].bottom && b.bottom > seen[n].top) }).length"""
"""Labels of an axis that stand on their neighbours."""


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_is_readable_at_any_width(browser: Browser, page: Path, width: int) -> None:
    show(browser, page, width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    sizes = browser.evaluate(f"{WORDS}.map(e => parseFloat(getComputedStyle(e).fontSize))")
    assert len(sizes) > 100
    assert min(sizes) >= 11
    marks = "[...document.querySelectorAll('.plot span')].every(t => { const a = t.getBoundingClientRect(); "
    assert browser.evaluate(marks + f"return a.left >= 0 && a.right <= {width} }})") is True
    assert browser.evaluate(OVERLAPS) == 0


def test_the_checks_see_small_words_and_labels_on_labels(browser: Browser, page: Path) -> None:
    show(browser, page, 400)
    browser.evaluate("document.querySelector('.x span').style.fontSize = '9px'")
    assert min(browser.evaluate(f"{WORDS}.map(e => parseFloat(getComputedStyle(e).fontSize))")) == 9
    browser.evaluate("document.querySelector('.x span:nth-child(3)').style.left = '1%'")
    assert browser.evaluate(OVERLAPS) > 0


def test_values_by_arrow_keys(browser: Browser, page: Path) -> None:
    show(browser, page)
    browser.evaluate("document.querySelector('.slider').focus()")
    first = "step 10: one (training) 4.5, one 4.5, two (training) 4.5, two 4.5"
    assert value(browser).replace(f"{page.parent}/", "") == first
    press(browser, "ArrowRight")
    press(browser, "ArrowRight")
    assert value(browser).startswith("step 30: ")
    press(browser, "ArrowLeft")
    assert value(browser).startswith("step 20: ")
    press(browser, "End")
    assert value(browser).startswith("step 50: ")
    assert "step 50" in browser.evaluate("document.querySelector('.values').textContent")
    assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == "Loss: trunk: training step"
    press(browser, "Tab")
    assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == "Loss: depth 1: training step"
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert browser.evaluate("document.querySelectorAll('.cursor:not([hidden])').length") == 2


def value(browser: Browser) -> str:
    return str(browser.evaluate("document.querySelector('.slider').getAttribute('aria-valuetext')"))


def test_values_by_pointer_and_touch(browser: Browser, page: Path) -> None:
    show(browser, page, 400)
    area = "(r => [r.left, r.top, r.width])(document.querySelector('.x').getBoundingClientRect())"
    browser.evaluate("document.querySelector('.plot').scrollIntoView()")
    left, top, width = browser.evaluate(area)
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * 0.26, y=top - 50)
    assert value(browser).startswith("step 20: ")
    for kind, points in (("touchStart", [{"x": left + width * 0.74, "y": top - 50}]), ("touchEnd", [])):
        browser.ask("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    assert value(browser).startswith("step 40: ")
    at = browser.evaluate("document.querySelector('.cursor').getBoundingClientRect().left")
    assert at == pytest.approx(left + width * 0.75, abs=1.5)


def test_tokens_by_click_and_arrow_keys(browser: Browser, page: Path) -> None:
    show(browser, page)
    told = "document.querySelector('.tokens').nextElementSibling.textContent"
    browser.evaluate("document.querySelector('.tokens').focus()")
    press(browser, "ArrowRight")
    assert browser.evaluate(told) == "word - step 0: draft 1, accepted (id 1)"
    press(browser, "ArrowRight")
    assert browser.evaluate(told) == "2 - step 0: draft, rejected (id 2)"
    browser.evaluate("document.querySelectorAll('.tokens .own')[4].click()")
    assert browser.evaluate(told) == "3 - step 4: the trunk's own (id 3)"
    assert browser.evaluate("document.querySelectorAll('.chosen').length") == 1


def test_switches_show_logarithmic_axes_and_smoothed_lines(browser: Browser, page: Path) -> None:
    show(browser, page)

    def visible(selector: str) -> int:
        seen: Any = browser.evaluate(
            f"[...document.querySelectorAll('{selector}')].filter(e => e.checkVisibility()).length"
        )
        return int(seen)

    assert (visible(".linear"), visible(".log"), visible(".smooth")) == (7, 0, 0)
    browser.evaluate("document.querySelector('#log').click()")
    assert (visible(".linear"), visible(".log")) == (4, 3)
    browser.evaluate("document.querySelector('#smooth').click()")
    assert visible(".smooth") == visible(".training polyline:not(.smooth)") > 0


def test_light_and_dark_have_colours_of_their_own(browser: Browser, page: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        show(browser, page, scheme=scheme)
        seen.append(browser.evaluate(ground))
    assert seen == ["rgb(252, 252, 250)", "rgb(25, 25, 24)"]


def test_the_check_sees_a_page_that_complains_and_asks(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>console.error('planted')</script><img src='absent.png'>")
    browser.open(tmp_path / "bad.html")
    assert len(browser.complaints()) == 2
    assert len(browser.requests()) == 2
