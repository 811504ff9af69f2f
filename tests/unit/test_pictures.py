"""Figures: the same bytes twice, text that cannot break out, readable on every background."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from mttrain import pictures
from mttrain.model import sinusoidal_positions
from mttrain.pictures import Panel, Series, curves, heat_maps, histogram, thinned

HOSTILE = [
    "<script>alert(1)</script>",
    "$x_1$",
    '"&amp;',
    "日本語",
    "▁the",
    "</s>",
    "]]>",
    "\\alpha$",
]
SVG = "{http://www.w3.org/2000/svg}"


def panel(rows: list[str], columns: list[str]) -> Panel:
    weights = np.linspace(0, 1, len(rows) * len(columns)).reshape(len(rows), len(columns))
    return Panel(weights, rows, columns, "cross, layer 1")


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_same_bytes_twice_whatever_the_settings(tmp_path: Path) -> None:
    """Stops dates, random ids and a user's matplotlibrc from getting into a file."""
    code = (
        "import numpy as np, sys, hashlib\n"
        "from mttrain.pictures import *\n"
        "p = [[Panel(np.eye(3), list('abc'), list('xyz'))]]\n"
        "data = heat_maps(p).render('svg') + curves([Series('a', [1, 2], [3, 4])]).render('svg')\n"
        "print(hashlib.sha256(data).hexdigest())\n"
    )
    (tmp_path / "matplotlibrc").write_text(
        "axes.linewidth: 5\nsvg.fonttype: path\nxtick.labelsize: 30\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for extra in ({"PYTHONHASHSEED": "1"}, {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc")})
    }
    assert len(answers) == 1


def test_no_word_of_caches(tmp_path: Path) -> None:
    """On a home that cannot be written to, matplotlib talks about its caches."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "MPL"))}
    answer = subprocess.run(
        [sys.executable, "-c", "from mttrain.pictures import *; require_matplotlib()"],
        env={**environment, "HOME": os.devnull, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stderr == ""


def test_hostile_tokens_stay_text() -> None:
    """Stops markup, mathematics and missing glyphs from doing more than being shown."""
    figure = heat_maps([[panel(HOSTILE, HOSTILE)]], page=True)
    svg = figure.render("svg").decode()
    for token in HOSTILE:
        assert texts(svg).count(token) == 2, token
    inline = figure.inline("x", "<b>title</b>")
    assert "<script" not in inline
    assert "<b>" not in inline
    root = ET.fromstring(
        inline.replace(
            "<svg ",
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" ',
            1,
        )
    )
    titles = [node.text or "" for node in root.iter(f"{SVG}title")]
    assert titles[0] == "<b>title</b>"
    assert any(title.startswith("<script>alert(1)</script> → ") for title in titles)


def test_png_has_the_size_of_the_picture() -> None:
    data = heat_maps([[panel(["a"], ["b", "c"])]]).render("png", dpi=72)
    assert data.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(data[n : n + 4], "big") for n in (16, 20))
    assert width > 2 * 20
    assert height > 20


def test_figures_of_one_page_share_no_id() -> None:
    """Stops a figure from being clipped by the outline of another."""
    one, two = (
        curves([Series("a", [1, 2, 3], [1, 2, 3])]).inline(name, "t") for name in ("one", "two")
    )
    ids = re.findall(r'id="([^"]+)"', one) + re.findall(r'id="([^"]+)"', two)
    assert len(ids) == len(set(ids))
    for svg in (one, two):
        known = set(re.findall(r'id="([^"]+)"', svg))
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) <= known


def test_page_figures_have_no_colour_of_their_own() -> None:
    """Stops black text on a dark page."""
    series = [Series(str(n), [1, 2], [n, n + 1], n) for n in range(8)]
    svg = curves(series, page=True).inline("c", "t")
    assert not set(re.findall(r"#[0-9a-f]{6}\b", svg))
    assert "var(--ink)" in svg or "var(--muted)" in svg
    assert all(f"var(--c{n})" in svg for n in range(6))


def test_gaps_and_tips() -> None:
    """A loss of nan must not stop the report, and no tip may sit on it."""
    one = Series(
        "a", [1, 2, 3], [1.0, math.nan, 2.0], marked=True, tips=["first", "second", "third"]
    )
    svg = curves([one]).inline("c", "t")
    assert "first" in svg
    assert "third" in svg
    assert "second" not in svg


def test_tip_lies_over_its_square() -> None:
    """Stops tips that tell the weight of another pair of tokens: the squares tile the image."""
    weights = np.array([[1.0, 0.0], [0.0, 0.5]])
    svg = heat_maps([[Panel(weights, ["r0", "r1"], ["c0", "c1"])]], page=True, cell=20).inline(
        "h", "t"
    )
    tips = re.findall(
        r'<rect class="tip" x="([\d.]+)" y="([\d.]+)" width="20" height="20"><title>([^<]+)<', svg
    )
    assert [tip[2] for tip in tips] == ["r0 → c0: 1.00", "r1 → c1: 0.50"]
    place = re.search(r'<image [^>]*transform="matrix\(20 0 0 20 ([\d.]+) ([\d.]+)\)"', svg)
    assert place is not None
    corners = [(float(tip[0]), float(tip[1])) for tip in tips]
    left, top = float(place[1]), float(place[2])
    assert corners == [
        pytest.approx((left, top), abs=0.1),
        pytest.approx((left + 20, top + 20), abs=0.1),
    ]


def test_nothing_of_a_figure_reaches_the_page_around_it() -> None:
    """The style sheet that matplotlib puts into an SVG would hold for the whole page."""
    svg = curves([Series("a", [1, 2], [1, 2])]).inline("c", "t")
    assert "<style" not in svg
    assert "<metadata" not in svg
    assert "font-family: var(--figure)" in svg
    assert "DejaVu" not in svg


def test_thinned_keeps_the_mean() -> None:
    x, y = thinned(list(range(1000)), [float(n) for n in range(1000)], most=100)
    assert len(x) == 100
    assert sum(y) / len(y) == pytest.approx(499.5)
    assert thinned([1, 2], [3, 4]) == ([1, 2], [3, 4])
    assert thinned([], []) == ([], [])
    assert math.isnan(thinned([1, 2], [math.nan, math.nan], most=1)[1][0])


def test_histogram_counts_every_pair() -> None:
    """Stops bars that leave out the longest pair or count a length twice."""
    rng = np.random.default_rng(1)
    for longest in (1, 5, 39, 40, 41, 97, 1000):
        values = rng.integers(1, longest + 1, 300)
        values[0] = longest
        figure = histogram([values, values], what="subwords").figure
        heights = [bar.get_height() for bar in figure.axes[0].patches]
        assert sum(heights) == 2 * len(values)


def test_positions_are_drawn() -> None:
    table = sinusoidal_positions(0, 16, 8).numpy()
    figure = pictures.position_table(table)
    shown = figure.figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(shown, table)
    (line,) = figure.figure.axes[2].lines
    np.testing.assert_allclose(line.get_ydata(), table @ table[0])
