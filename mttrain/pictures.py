"""Figures as SVG and PNG bytes, drawn by matplotlib without its global state.

Nothing here opens a window, keeps a figure or reads a matplotlibrc: the same numbers give the same
bytes. Text stays text in an SVG, so that its reader's fonts show what matplotlib's own lack (a PNG
has boxes there); no text is taken for mathematics.

A figure for a page is drawn in stand-in colours that become CSS variables (--ink, --muted, --grid,
--c0 to --c5), so that one picture serves a light and a dark scheme; its ids get a prefix, so that
several fit on one page. A figure for a file has plain colours on white.

Price: importing matplotlib takes half a second, a figure 20 to 100 ms.
"""

from __future__ import annotations

import html
import io
import logging
import math
import re
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mttrain.errors import MissingDependency

Format = Literal["svg", "png"]
Numbers = Sequence[float]

SERIES = 6  # colours; then they begin again, with another dash
_FILE = {"ink": "#1f2937", "muted": "#6b7280", "grid": "#e5e7eb"}
_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2")
_HEAT = "#1d4ed8"  # of a heat map: nothing at weight 0, this at weight 1
# Stand-ins of the CSS variables: no two figures' worth of colours, and no colour anyone would use.
_PAGE = {"ink": "#010101", "muted": "#020202", "grid": "#030303"}
_PAGE_COLOURS = tuple(f"#04040{n}" for n in range(SERIES))
_VARIABLES = {colour: f"var(--{name})" for name, colour in _PAGE.items()} | {
    colour: f"var(--c{n})" for n, colour in enumerate(_PAGE_COLOURS)
}
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_FONTS = (
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei",
    "IPAGothic", "Arial Unicode MS", "PingFang SC", "Microsoft YaHei",
)  # fmt: skip
_SVG_FONTS = b"'DejaVu Sans', Verdana, sans-serif"
_FONT = 12.0  # pixels, as all sizes here: a figure has 72 of them an inch
_MOST_POINTS = 400  # of a curve; more become means of neighbours


@dataclass(frozen=True)
class Series:
    """A curve; `tips` are shown where the pointer is, one for each point, in an SVG for a page."""

    label: str
    x: Numbers
    y: Numbers
    colour: int = 0
    marked: bool = False  # a dot at each point: they are few
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    """A heat map: weights [rows, columns] from 0 to 1, and the tokens at its sides."""

    weights: NDArray[Any]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""


@dataclass
class Picture:
    """A figure that is drawn: `render` gives its bytes. Sizes in pixels."""

    figure: Any
    width: float
    height: float
    tips: list[str] = field(default_factory=list)  # SVG elements over the drawing

    def render(self, kind: Format, dpi: float = 144.0) -> bytes:
        """A file of that kind; `dpi`: of a PNG, 72 is one dot for each pixel."""
        buffer = io.BytesIO()
        with _settings(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            # Names of programs and dates are left out: equal figures are equal files.
            empty = dict.fromkeys(("Creator", "Date", "Format", "Type") if kind == "svg" else ())
            extra = {"metadata": empty} if kind == "svg" else {"metadata": {"Software": None}}
            self.figure.savefig(buffer, format=kind, dpi=72 if kind == "svg" else dpi, **extra)
        data = buffer.getvalue()
        if kind == "svg":  # any reader's font rather than a list of those that are installed here
            data = re.sub(rb"font-family: [^;\"]*", b"font-family: " + _SVG_FONTS, data)
        return data

    def inline(self, name: str, title: str) -> str:
        """An <svg> element for a page. name: prefix of its ids; title: what it shows, in words."""
        text = self.render("svg").decode("utf-8")
        text = text[text.index("<svg") :]
        # Its style sheet would be that of the whole page, which has these rules itself.
        text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
        body = _own_ids(text[text.index(">") + 1 :], name)
        for colour, variable in _VARIABLES.items():
            body = body.replace(colour, variable)
        body = re.sub(r"font-family: [^;\"]*", "font-family: var(--figure)", body)
        body = body.replace("</svg>", "".join(self.tips) + "</svg>")
        width, height = f"{self.width:g}", f"{self.height:g}"
        return (
            f'<svg class="figure" role="img" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}"><title>{html.escape(title)}</title>{body.strip()}'
        )


# ---- matplotlib -------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raise now what every figure would raise; and no word about its caches, whatever the home."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import matplotlib.figure
        import matplotlib.font_manager  # noqa: F401
    except ImportError:
        raise MissingDependency(
            "Pictures need a package that is not installed: pip install 'mttrain[report]'"
        ) from None
    finally:
        log.setLevel(level)


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's defaults and ours, for as long as something is drawn."""
    require_matplotlib()
    import matplotlib
    from matplotlib.font_manager import fontManager

    known = set(fontManager.get_font_names())
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "mttrain",
                "text.parse_math": False,
                "text.usetex": False,
                "font.family": [name for name in _FONTS if name in known],
                "font.size": _FONT,
                "axes.titlesize": _FONT,
                "axes.linewidth": 0.8,
                "path.simplify_threshold": 0.2,
            }
        )
        yield


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    return figure


def _axes(figure: Any, box: tuple[float, float, float, float]) -> Any:
    """Axes at (left, top, width, height), in pixels from the upper left corner."""
    wide, high = figure.get_size_inches() * 72
    left, top, width, height = box
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def _own_ids(text: str, name: str) -> str:
    """The SVG with ids of its own: those that are referred to get the prefix, the others go."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)


def text_width(text: str) -> float:
    """About how wide the text is at the figures' size, in pixels; wide characters count twice."""
    units = 0.0
    for character in text:
        if unicodedata.combining(character):
            continue
        wide = unicodedata.east_asian_width(character) in "WF"
        units += 1.1 if wide else 0.45 if character in "ijlt.,'|:;! " else 0.64
    return units * _FONT


def _shortened(text: str, most: int = 30) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# ---- curves -----------------------------------------------------------------------------------


def curves(
    series: Sequence[Series],
    *,
    logarithmic: bool = False,
    page: bool = True,
    width: float = 440,
    height: float = 240,
) -> Picture:
    """Curves over the updates of a run. Points that are no numbers leave a gap."""
    palette, colours = (_PAGE, _PAGE_COLOURS) if page else (_FILE, _COLOURS)
    with _settings():
        figure = _figure(width, height)
        axes = _axes(figure, (54, 10, width - 70, height - 48))
        _plain_axes(axes, palette)
        if logarithmic:
            axes.set_yscale("log")
        drawn = []
        for one in series:
            x, y = thinned(one.x, one.y)
            (line,) = axes.plot(
                x,
                y,
                color=colours[one.colour % SERIES],
                linestyle=_DASHES[one.colour // SERIES % len(_DASHES)],
                linewidth=1.8,
                marker="o" if one.marked and len(x) <= 60 else None,
                markersize=4,
            )
            drawn.append((one, line))
        axes.set_xlabel("update", color=palette["muted"], labelpad=4)
        _plain_ticks(axes, logarithmic)
        tips = [tip for one, _ in drawn for tip in _point_tips(one, axes, height)]
    return Picture(figure, width, height, tips)


def _plain_axes(axes: Any, palette: dict[str, str]) -> None:
    """Two thin lines and a grid that stays behind the data."""
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(True, axis="y", color=palette["grid"], linewidth=1)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette["muted"])
    axes.tick_params(colors=palette["muted"], length=0, pad=6, which="both")


def _plain_ticks(axes: Any, logarithmic: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    if logarithmic:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _point_tips(one: Series, axes: Any, height: float) -> list[str]:
    """Circles that show nothing but the tip of a point, over the points."""
    tips = []
    for x, y, tip in zip(one.x, one.y, one.tips, strict=False):
        if math.isfinite(y):
            left, bottom = axes.transData.transform((x, y))
            tips.append(
                f'<circle class="tip" cx="{left:.1f}" cy="{height - bottom:.1f}" r="8">'
                f"<title>{html.escape(tip)}</title></circle>"
            )
    return tips


def thinned(x: Numbers, y: Numbers, most: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most `most` points: of each run of neighbours the mean of those that are numbers."""
    step = -(-len(x) // most) if x else 1
    if step == 1:
        return list(x), list(y)
    places, means = [], []
    for start in range(0, len(x), step):
        known = [value for value in y[start : start + step] if math.isfinite(value)]
        places.append(sum(x[start : start + step]) / len(x[start : start + step]))
        means.append(sum(known) / len(known) if known else math.nan)
    return places, means


def short_number(value: float) -> str:
    """1500 -> 1.5k, 0.0003 -> 0.0003, 2e-06 -> 2e-06"""
    if not math.isfinite(value):
        return str(value)
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{sign}"
    return f"{value:.4g}"


# ---- bars -------------------------------------------------------------------------------------


def histogram(
    values: Sequence[NDArray[Any]],
    *,
    what: str,
    page: bool = True,
    width: float = 440,
    height: float = 240,
) -> Picture:
    """How often each length occurs, one colour for each array. what: name of the lengths."""
    palette, colours = (_PAGE, _PAGE_COLOURS) if page else (_FILE, _COLOURS)
    longest = max(int(value.max()) for value in values)
    bins = min(longest, 40)
    # Whole numbers per bar, or some bars hold one length more than others.
    step = -(-longest // bins)
    edges = np.arange(0.5, longest + step + 0.5, step)
    with _settings():
        figure = _figure(width, height)
        axes = _axes(figure, (54, 10, width - 70, height - 48))
        _plain_axes(axes, palette)
        for number, value in enumerate(values):
            counts, _ = np.histogram(value, edges)
            share = (number - (len(values) - 1) / 2) / len(values)
            axes.bar(
                (edges[:-1] + edges[1:]) / 2 + share * step * 0.86,
                counts,
                width=step * 0.86 / len(values),
                color=colours[number % SERIES],
            )
        axes.set_xlabel(what, color=palette["muted"], labelpad=4)
        _plain_ticks(axes, logarithmic=False)
    return Picture(figure, width, height)


# ---- heat maps --------------------------------------------------------------------------------


def heat_maps(
    grid: Sequence[Sequence[Panel]], *, page: bool = False, cell: float | None = None
) -> Picture:
    """Panels in rows and columns, as large as their tokens need. cell: pixels of a weight's square.

    Panels of one column have the same column tokens, and panels of one row the same row tokens.
    """
    palette = _PAGE if page else _FILE
    panels = [panel for row in grid for panel in row]
    rows, columns = (max(len(getattr(p, side)) for p in panels) for side in ("rows", "columns"))
    size = cell or (24.0 if len(panels) == 1 else 17.0)
    left = 12 + max(text_width(_shortened(token)) for p in panels for token in p.rows)
    top = 14 + max(text_width(_shortened(token)) for p in panels for token in p.columns)
    title = 20.0 if any(panel.title for panel in panels) else 0.0
    titles = 6 + max(text_width(panel.title) for panel in panels)
    wide, high = max(left + columns * size + 14, titles), top + title + rows * size + 14
    width, height = wide * max(map(len, grid)), high * len(grid)
    tips: list[str] = []
    with _settings():
        figure = _figure(width, height)
        if not page:
            figure.patch.set(visible=True, facecolor="white")
        for y, row in enumerate(grid):
            for x, panel in enumerate(row):
                shown = (len(panel.columns) * size, len(panel.rows) * size)
                box = (x * wide + left, y * high + top + title, *shown)
                _draw_panel(_axes(figure, box), panel, palette)
                if panel.title:
                    figure.text(
                        (x * wide + 6) / width,
                        1 - (y * high + 6) / height,
                        panel.title,
                        color=palette["muted"],
                        va="top",
                    )
                if page:
                    tips += _cell_tips(panel, box[0], box[1], size)
    return Picture(figure, width, height, tips)


def _draw_panel(axes: Any, panel: Panel, palette: dict[str, str]) -> None:
    axes.patch.set_visible(False)
    colour = tuple(int(_HEAT[n : n + 2], 16) / 255 for n in (1, 3, 5))
    image = np.empty((*panel.weights.shape, 4))
    image[..., :3] = colour
    image[..., 3] = np.clip(panel.weights, 0, 1)  # transparent at 0: right on any background
    axes.imshow(image, interpolation="none", aspect="auto")
    axes.set_xticks(range(len(panel.columns)), [_shortened(token) for token in panel.columns])
    axes.set_yticks(range(len(panel.rows)), [_shortened(token) for token in panel.rows])
    axes.tick_params(colors=palette["ink"], length=0, pad=5)
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False)
    for label in axes.get_xticklabels():
        label.set(rotation=90, rotation_mode="anchor", ha="left", va="center_baseline")
    for edge, count in ((axes.axvline, len(panel.columns)), (axes.axhline, len(panel.rows))):
        for place in range(1, count):
            edge(place - 0.5, color=palette["grid"], linewidth=0.7)
    for spine in axes.spines.values():
        spine.set_color(palette["grid"])


def _cell_tips(panel: Panel, left: float, top: float, size: float) -> list[str]:
    """Squares that show nothing but the tip of a weight, over the weights of 0.05 and more."""
    return [
        f'<rect class="tip" x="{left + x * size:.1f}" y="{top + y * size:.1f}" width="{size:g}" '
        f'height="{size:g}"><title>{html.escape(f"{panel.rows[y]} → {panel.columns[x]}")}: '
        f"{panel.weights[y, x]:.2f}</title></rect>"
        for y, x in np.argwhere(panel.weights >= 0.05).tolist()
    ]


def position_table(table: NDArray[Any]) -> Picture:
    """The position table [length, D] as a heat map, and the dot products of its rows by distance.

    For sinusoidal positions the product depends on the distance alone (Vaswani et al. 2017,
    section 3.5); the curve is that of position 0 with each of the others.
    """
    length, d_model = table.shape
    products = table @ table[0]
    width, height = 760.0, 620.0
    with _settings():
        figure = _figure(width, height)
        figure.patch.set(visible=True, facecolor="white")
        axes = _axes(figure, (64, 40, 590, 300))
        image = axes.imshow(
            table, aspect="auto", interpolation="none", cmap="RdBu_r", vmin=-1, vmax=1
        )
        axes.set_title("Sinusoidal positions", color=_FILE["ink"], pad=10)
        axes.set_xlabel("column (2i: sine, 2i+1: cosine)", color=_FILE["muted"])
        axes.set_ylabel("position", color=_FILE["muted"])
        bar = figure.colorbar(image, cax=_axes(figure, (668, 40, 12, 300)))
        below = _axes(figure, (64, 430, 590, 140))
        _plain_axes(below, _FILE)
        below.plot(range(length), products, color=_COLOURS[0], linewidth=1.8)
        below.set_title(
            f"Dot product of two positions by their distance ({d_model} columns)",
            color=_FILE["ink"],
            pad=10,
        )
        below.set_xlabel("distance", color=_FILE["muted"])
        _plain_ticks(below, logarithmic=False)
        for part in (axes, bar.ax):
            part.tick_params(colors=_FILE["muted"], length=0)
            for spine in part.spines.values():
                spine.set_color(_FILE["grid"])
    return Picture(figure, width, height)
