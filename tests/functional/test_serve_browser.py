"""The server's page as a browser shows it: a text with its drafts in colour, figures, by keys alone, at any width."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import NAMES, Browser, find_browser

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from parrot import Parrot, Running, running, words

COMMAND = find_browser()
pytestmark = pytest.mark.skipif(
    COMMAND is None,
    reason=f"no Chromium ({', '.join(NAMES)}) on the PATH; install one, or name one: "
    "CHROMIUM=/path/to/chromium pytest tests/functional/test_serve_browser.py",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(Parrot(pace=0.005), words(tmp_path_factory.mktemp("tokenizer")), key="k") as served:
        yield served


@pytest.fixture
def browser(server: Running, tmp_path: Path) -> Iterator[Browser]:
    """At the server's page."""
    assert COMMAND is not None
    with Browser(COMMAND, tmp_path) as opened:
        opened.ask("Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=False)
        opened.open(server.url)
        yield opened


def type_in(browser: Browser, name: str, value: str) -> None:
    browser.evaluate(f"document.querySelector('[name={name}]').focus()")
    browser.evaluate("document.activeElement.select()")
    browser.ask("Input.insertText", text=value)


def press(browser: Browser, key: str, code: int, modifiers: int = 0) -> None:
    for kind in ("rawKeyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                    modifiers=modifiers)  # fmt: skip


def until(browser: Browser, script: str) -> Any:
    """The value of an expression, once it is true."""
    deadline = time.monotonic() + 20
    while not (value := browser.evaluate(script)):
        assert time.monotonic() < deadline, script
        time.sleep(0.02)
    return value


CTRL, ENTER, ESCAPE, TAB = 2, 13, 27, 9
ENDED = "document.querySelector('.tokens').getAttribute('aria-busy') === 'false'"


def generate(browser: Browser, prompt: str, tokens: int, key: str = "k") -> None:
    for name, value in (("prompt", prompt), ("max_tokens", str(tokens)), ("key", key)):
        type_in(browser, name, value)
    press(browser, "Enter", ENTER, CTRL)


def test_a_text_appears_with_its_drafts_in_colour_and_its_figures(browser: Browser, server: Running) -> None:
    generate(browser, "ab€", 20)
    until(browser, ENDED)
    assert browser.evaluate("document.querySelector('.tokens').textContent") == "ab€" + "ab€" * 4
    accepted = server.engine.stats.accepted
    spans = browser.evaluate("document.querySelectorAll('.tokens .accepted').length")
    assert spans == accepted > 0
    colour = "getComputedStyle(document.querySelector('.tokens .accepted')).backgroundColor"
    assert browser.evaluate(colour) == "rgb(207, 233, 207)"
    assert browser.evaluate("document.querySelector('#figures').textContent").startswith("20 tokens, ")
    rows = browser.evaluate("[...document.querySelectorAll('#positions tr')].map(row => row.innerText)")
    shares = zip(server.engine.stats.accepted_at, server.engine.stats.offered_at, strict=True)
    for place, (row, (hit, of)) in enumerate(zip(rows, shares, strict=True), start=1):
        assert row.split() == [str(place), f"{100 * hit / of:.1f}", "%", str(hit), "of", str(of)]
    assert browser.complaints() == []
    assert {url.removeprefix(server.url) for url in browser.requests()} - {"data:,"} == {"/", "/v1/completions"}


def test_escape_stops_a_text_and_frees_it(browser: Browser, server: Running) -> None:
    generate(browser, "ab", 400)
    until(browser, "document.querySelectorAll('.tokens span').length > 4")
    press(browser, "Escape", ESCAPE)
    until(browser, ENDED)
    deadline = time.monotonic() + 20
    while server.engine.busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.engine.cancelled == 1
    assert browser.evaluate("document.querySelector('.error').textContent") == ""


def test_an_error_is_said(browser: Browser) -> None:
    generate(browser, "ab", 20, key="wrong")
    said = until(browser, "document.querySelector('.error').textContent")
    assert said == "the API key is missing or wrong; send it as `Authorization: Bearer KEY`."
    assert browser.evaluate("document.querySelector('[type=submit]').disabled") is False


def test_everything_is_reached_by_tab_and_fits_a_phone(browser: Browser) -> None:
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    sizes = "[...document.querySelectorAll('main *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert min(browser.evaluate(sizes)) >= 13
    reached = []
    for _ in range(6):
        press(browser, "Tab", TAB)
        reached.append(browser.evaluate("document.activeElement.name || document.activeElement.textContent"))
        assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached[:5] == ["prompt", "max_tokens", "temperature", "key", "Generate"]


def test_light_and_dark_have_colours_of_their_own(browser: Browser, server: Running) -> None:
    seen = []
    for scheme in ("light", "dark"):
        browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(server.url)
        seen.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(252, 252, 250)", "rgb(25, 25, 24)"]
