"""The report as one page of HTML: no script, no font, no request, the same bytes for the same runs.

`page` puts what `report` gathered into the template report.html.j2, which escapes all of it; only
the SVG of `pictures` is taken as it is. The page forbids itself to load or run anything (its
Content-Security-Policy), signs that steer text or terminals are spelled out, and every foreign text
stands in an element of its own direction.

Price: a second for the figures of a run; the page has some 20 KB for each figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mttrain import __version__
from mttrain.errors import MissingDependency
from mttrain.pictures import Series, curves, heat_maps, histogram, short_number
from mttrain.report import Curve, RunFacts, Translated, lengths, number
from mttrain.report_parts import (
    by_lines,
    comparisons,
    environment,
    headline,
    listed,
    logged_samples,
    logged_scores,
    mapping,
    measured_how,
    sample_groups,
    settings_table,
    visible,
)


@dataclass(frozen=True)
class Figure:
    """A chart with its heading; legend: colour number and label."""

    title: str
    svg: Any  # Markup
    legend: list[tuple[int, str]] = field(default_factory=list)
    note: str = ""


def require_jinja() -> None:
    """Raise now what `page` would raise."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise MissingDependency(
            "A report needs a package that is not installed: pip install 'mttrain[report]'"
        ) from None


def page(runs: Sequence[RunFacts], translated: Sequence[Translated | None]) -> str:
    """The HTML of a report on one run, or on several side by side."""
    require_jinja()
    import jinja2

    folder = Path(__file__).parent
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["visible"] = visible
    templates.filters["breakable"] = _breakable
    templates.filters["figure"] = lambda value: f"{value:.2f}" if math.isfinite(value) else "–"
    template = templates.get_template("report.html.j2")
    return template.render(_content(runs, translated))


def _content(runs: Sequence[RunFacts], translated: Sequence[Translated | None]) -> dict[str, Any]:
    """All that the template shows."""
    known = [(run, found) for run, found in zip(runs, translated, strict=True) if found]
    return {
        "version": __version__,
        "runs": runs,
        "several": len(runs) > 1,
        "title": ", ".join(run.label for run in runs),
        "facts": [headline(run, found) for run, found in zip(runs, translated, strict=True)],
        "notes": [(run.label, note) for run in runs for note in run.notes],
        "scores": [(run.label, found, found.scores) for run, found in known],
        "measured": measured_how(known),
        "logged": [logged_scores(run) for run in runs],
        "comparisons": comparisons(known),
        "charts": _charts(runs),
        "samples": sample_groups(known),
        "apart": len(by_lines(known)) > 1,
        "logged_samples": [] if known else logged_samples(runs),
        "heats": [
            (run.label, heat, _heat_figure(heat, f"heat{n}-{m}"))
            for n, (run, found) in enumerate(known)
            for m, heat in enumerate(found.heats[: 1 if len(runs) > 2 else 2 * (3 - len(runs))])
        ],
        "corpora": [_corpus(run, n) for n, run in enumerate(runs)],
        "settings": settings_table(runs),
        "environments": [environment(run) for run in runs],
    }


# ---- figures ----------------------------------------------------------------------------------

# Title, (kind of record, name in it, label in a legend)..., logarithmic, dots.
_CHARTS: tuple[tuple[str, tuple[tuple[str, str, str], ...], bool, bool], ...] = (
    ("Training loss (label-smoothed)", (("train", "loss", "training"),), False, False),
    (
        "Negative log-likelihood, nats per token",
        (("train", "nll", "training"), ("valid", "nll", "validation")),
        True,
        False,
    ),
    ("Validation perplexity", (("valid", "perplexity", "validation"),), True, True),
    ("Validation BLEU", (("valid", "bleu", "BLEU"),), False, True),
    ("Validation chrF", (("valid", "chrf", "chrF"),), False, True),
    ("Learning rate", (("train", "lr", "learning rate"),), False, False),
    ("Target tokens per second", (("train", "tokens_per_second", "tokens"),), False, False),
    ("Gradient norm, before clipping", (("train", "grad_norm", "norm"),), True, False),
)


def _charts(runs: Sequence[RunFacts]) -> list[Figure]:
    """One figure for each measure that a log has; the curves of runs lie over each other."""
    figures = []
    for place, (title, sources, logarithmic, marks) in enumerate(_CHARTS):
        series = []
        for n, run in enumerate(runs):
            for m, (kind, name, label) in enumerate(sources):
                if len(runs) > 1 and m < len(sources) - 1:
                    continue  # of several runs the validation alone
                x, y = run.curve(kind, name)
                if any(map(math.isfinite, y)):
                    shown = visible(run.label, 60) if len(runs) > 1 else label
                    colour = n if len(runs) > 1 else m
                    series.append(_series((x, y), shown, colour, kind == "valid" or marks))
        if not series:
            continue
        if len(runs) > 1 and len(sources) > 1:
            title = f"Validation {title[0].lower()}{title[1:]}"
        log = logarithmic and all(v > 0 for one in series for v in one.y if math.isfinite(v))
        names = ", ".join(f"{one.label}: {short_number(_last(one.y))}" for one in series)
        picture = curves(series, logarithmic=log)
        svg = _markup(picture.inline(f"chart{place}", f"{title} over the updates; last {names}"))
        legend = [(one.colour, one.label) for one in series] if len(series) > 1 else []
        figures.append(Figure(title, svg, legend, "log scale" if log else ""))
    return figures


def _series(curve: Curve, label: str, colour: int, marks: bool) -> Series:
    x, y = curve
    tips = [f"{label}, update {a:,.0f}: {b:.5g}" for a, b in zip(x, y, strict=True)]
    return Series(label, x, y, colour, marks, tips if marks and len(x) <= 60 else ())


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def _markup(svg: str) -> Any:
    from markupsafe import Markup

    return Markup(svg)  # made by `pictures`, which escapes every text in it


def _breakable(text: str) -> Any:
    """A signature that may break after each of its parts; the parts are escaped."""
    from markupsafe import Markup

    return Markup("|<wbr>").join(visible(text, 200).split("|"))


def _heat_figure(heat: Any, name: str) -> Any:
    picture = heat_maps([[heat.panel]], page=True)
    title = f"Cross-attention of: {visible(heat.source, 200)}"
    return _markup(picture.inline(name, title))


def _corpus(run: RunFacts, place: int) -> dict[str, Any]:
    """What the log says of the text, and how long the training pairs are."""
    record, found = run.last("corpus"), lengths(run)
    splits = [split for split in listed(record.get("splits")) if isinstance(split, dict)]
    figure = None
    if found:
        names = [f"{side} ({run.settings['data'][f'{side}_lang']})" for side in found]
        picture = histogram(list(found.values()), what="subwords of a training pair, EOS included")
        title = "Lengths of the training pairs in subwords"
        svg = _markup(picture.inline(f"lengths{place}", title))
        figure = Figure("Lengths of the training pairs", svg, list(enumerate(names)))
    return {
        "label": run.label,
        "splits": [_split_row(split) for split in splits],
        "percentiles": listed(record.get("percentiles")),
        "lengths": [
            (str(name), listed(values))
            for name, values in mapping(splits[0].get("lengths") if splits else None).items()
        ],
        "warnings": [str(warning) for warning in listed(record.get("warnings"))],
        "figure": figure,
    }


def _split_row(split: Mapping[str, Any]) -> dict[str, Any]:
    skipped = mapping(split.get("skipped"))
    reasons = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in skipped.items())
    counts = {
        key: f"{number(split.get(key)):,.0f}"
        for key in ("pairs", "kept", "duplicates", "identical", "overlap")
    }
    return {"name": str(split.get("split")), "skipped": reasons or "none", **counts}
