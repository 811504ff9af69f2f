"""The report in a real browser: it complains of nothing, asks for nothing and fits a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mttrain.cli import main
from tests.integration.browser_help import Browser, browser, find_browser
from tests.integration.report_help import made_run

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no chromium, chromium-browser or google-chrome on the path"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, random_run: Path) -> list[Path]:
    """A report on one run and one on two, with hostile text."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        str(made_run(folder, name, random_run, optim={"lr": lr}))
        for name, lr in (("first", 1e-3), ("a-second-run-with-a-very-long-name-of-its-own", 2e-3))
    ]
    made = [folder / "one.html", folder / "two.html"]
    assert main(["report", runs[0], "--output", str(made[0]), "--device", "cpu"]) == 0
    assert main(["report", *runs, "--output", str(made[1]), "--device", "cpu"]) == 0
    return made


@pytest.mark.parametrize("number", [0, 1])
def test_page_in_a_browser(tab: Browser, pages: list[Path], number: int, tmp_path: Path) -> None:
    """Stops a page that scrolls sideways, loads something or has an error at any width."""
    page = pages[number]
    for width, scheme in ((1280, "light"), (390, "light"), (390, "dark")):
        tab.events.clear()
        tab.open(page, width, 900, scheme)
        assert tab.value("document.documentElement.clientWidth") == width
        assert tab.value("document.documentElement.scrollWidth") <= width
        assert tab.value("document.querySelectorAll('svg.figure').length") >= 5
        assert tab.value("document.scripts.length") == 0
        assert tab.requests() == []
        assert tab.complaints() == []
        picture = tmp_path / f"{width}-{scheme}.png"
        tab.screenshot(picture)
        assert picture.stat().st_size > 10_000


def test_wide_tables(tab: Browser, pages: list[Path]) -> None:
    """Stops signatures cut at the edge of a wide page, and a narrow one that hides that it scrolls:
    at the right edge of a table that goes on there is a shadow, over the paper."""
    scores = "document.querySelector('[aria-label=Scores]')"
    for width, fits in ((1280, True), (390, False)):
        tab.open(pages[1], width)
        assert tab.value(f"{scores}.scrollWidth <= {scores}.clientWidth") is fits
        layers = tab.value(f"getComputedStyle({scores}).backgroundImage")
        assert layers.count("linear-gradient") == 4
        attachments = tab.value(f"getComputedStyle({scores}).backgroundAttachment")
        assert attachments == "local, local, scroll, scroll"


def test_colours_follow_the_scheme(tab: Browser, pages: list[Path]) -> None:
    """Stops figures in dark ink on a dark page."""
    seen = {}
    for scheme in ("light", "dark"):
        tab.open(pages[0], 1280, 900, scheme)
        seen[scheme] = tab.value(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('svg.figure text')).fill]"
        )
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1] != seen["dark"][1]
    for background, ink in seen.values():
        assert background != ink


def test_contents_lead_to_their_sections(tab: Browser, pages: list[Path]) -> None:
    tab.open(pages[0], 1280)
    missing = tab.value(
        "[...document.querySelectorAll('nav a')]"
        ".filter(a => !document.querySelector(a.getAttribute('href'))).length"
    )
    assert missing == 0
    assert tab.value("document.querySelectorAll('nav a').length") >= 7
