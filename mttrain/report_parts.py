"""What a report says in words and tables: headline, samples, scores, settings, how to do it again.

Plain values for the template. Foreign texts are made harmless to look at (`visible`); the template
escapes them. Costs next to nothing but for the comparison of words, whose time grows with the
square of a sentence and is bounded.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mttrain.config import RunConfig
from mttrain.metrics import Comparison
from mttrain.pictures import short_number
from mttrain.report import RunFacts, Translated, compare_runs, number, same_lines

SAMPLES, WORST, LONGEST = 20, 10, 5
_NAMES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "comet": "COMET", "nll": "NLL"}
_MOST_SHOWN = 1200  # characters of a text
_MOST_WORDS = 600  # of a side that is compared; the time grows with the product
# Letters of scripts without spaces are compared one by one, other words as a whole.
_WORDS = re.compile(r"[぀-ヿ㐀-䶿一-鿿豈-﫿฀-๿]|[^\W぀-ヿ㐀-䶿一-鿿豈-﫿฀-๿]+|\s+|.", re.DOTALL)
Segment = tuple[str, str]
"""A class (same, extra, missing) and the text."""


@dataclass(frozen=True)
class Output:
    """What one run made of a line."""

    label: str
    segments: list[Segment]
    score: float
    flags: list[str]


@dataclass(frozen=True)
class Sample:
    """A line with its reference and the outputs of the runs."""

    number: int
    source: str
    reference: list[Segment]
    outputs: list[Output]
    equal: bool  # all outputs are the reference


# ---- text -------------------------------------------------------------------------------------


def visible(text: str, most: int = _MOST_SHOWN) -> str:
    """A text for the eye: signs that steer are spelled out, and what is very long is cut."""
    more = len(text) - most
    shown = "".join(map(_visible_sign, text[:most]))
    return f"{shown} … ({more:,} more characters)" if more > 0 else shown


def _visible_sign(sign: str) -> str:
    if sign == " " or sign.isprintable():
        return sign
    code = ord(sign)
    if code < 32:
        return chr(0x2400 + code)  # the pictures of control characters
    if unicodedata.category(sign) in ("Zs", "Zl", "Zp"):
        return " "
    return f"⟨U+{code:04X}⟩"


def marked(text: str, reference: str) -> tuple[list[Segment], list[Segment]]:
    """The text with what the reference lacks, and the reference with what the text lacks."""
    mine, theirs = _WORDS.findall(text), _WORDS.findall(reference)
    if max(len(mine), len(theirs)) > _MOST_WORDS or len(text) + len(reference) > 20_000:
        return [("same", visible(text))], [("same", visible(reference))]
    extra, missing = [], []
    matcher = difflib.SequenceMatcher(None, theirs, mine, autojunk=False)
    for what, a, b, c, d in matcher.get_opcodes():
        if c < d:
            extra.append(("same" if what == "equal" else "extra", "".join(mine[c:d])))
        if a < b:
            missing.append(("same" if what == "equal" else "missing", "".join(theirs[a:b])))
    return _visible_segments(extra), _visible_segments(missing)


def _visible_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Cut in whole, since a very long word is one segment; the space around a mark is not in it."""
    shown: list[Segment] = []
    left = _MOST_SHOWN
    for kind, text in segments:
        if left <= 0:
            return [*shown, ("same", "…")]
        inner = text.strip()
        if kind == "same" or not inner:
            shown.append(("same", visible(text, left)))
        else:
            before, after = text[: text.index(inner)], text[text.index(inner) + len(inner) :]
            parts = [("same", before), (kind, visible(inner, left)), ("same", after)]
            shown += [part for part in parts if part[1]]
        left -= len(text)
    return shown


def listed(value: Any) -> list[Any]:
    """The value if it is a list; else an empty one: a damaged log shows less, no more."""
    return value if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


# ---- the parts --------------------------------------------------------------------------------


def headline(run: RunFacts, found: Translated | None) -> list[tuple[str, str, str]]:
    """(what, figure, detail) of the run at a glance."""
    facts = []
    for score in found.scores[:2] if found is not None else ():
        spread = f"± {score.ci[1]:.2f}, " if score.ci else ""
        facts.append((score.name, f"{score.value:.2f}", f"{spread}{_set_name(found)}"))
    valid, steps = run.last("valid"), run.curve("train", "loss")[0]
    if not facts and valid:
        facts += [
            (name, f"{number(valid.get(key)):.2f}", "validation, last")
            for name, key in (("BLEU", "bleu"), ("chrF", "chrf"))
        ]
    perplexity, of_which = _perplexity(run, found)
    if math.isfinite(perplexity):
        facts.append(("Perplexity", f"{perplexity:.2f}", of_which))
    seconds = number(run.last("end").get("elapsed", run.last("train").get("seconds")))
    if steps:
        facts.append(("Updates", f"{steps[-1]:,.0f}", run.state()))
    if math.isfinite(seconds):
        facts.append(("Time", duration(seconds), "in training"))
    size = number(run.last("begin").get("parameters"))
    if math.isfinite(size):
        facts.append(("Parameters", short_number(size), f"{size:,.0f}"))
    return facts


def _perplexity(run: RunFacts, found: Translated | None) -> tuple[float, str]:
    """That of the checkpoint whose scores stand beside it, and on which text it was measured."""
    if found is None:
        return number(run.last("valid").get("perplexity")), "validation, last"
    nll = number(run.index.scores.get(run.checkpoint or "", {}).get("nll"))
    # Beyond 700 the exponential passes the largest float.
    value = math.exp(nll) if nll < 700 else math.nan
    return value, f"validation set, {run.checkpoint}"


def measured_how(
    known: Sequence[tuple[RunFacts, Translated]],
) -> list[tuple[str, str]]:
    """(label, words): of what and how the scores were measured; once, "" for all, where alike."""
    found = [
        (
            run.label,
            f"on {len(one.sources):,} of {one.total:,} lines of the "
            f"{'test' if one.split == 'test' else 'validation'} set, with {one.how}",
        )
        for run, one in known
    ]
    alike = len({words for _, words in found}) == 1 and len(by_lines(known)) == 1
    return [("", found[0][1])] if alike else found


def _set_name(found: Translated | None) -> str:
    if found is None:
        return ""
    name = "test set" if found.split == "test" else "validation set"
    count = len(found.sources)
    return name if count == found.total else f"{count:,} of {found.total:,} lines of the {name}"


def duration(seconds: float) -> str:
    """5400 -> 1.5 h; 75 -> 1.25 min"""
    size, name = next(
        (pair for pair in ((3600.0, "h"), (60.0, "min")) if seconds >= pair[0]), (1.0, "s")
    )
    amount = seconds / size
    return f"{amount:,.0f} {name}" if amount >= 100 else f"{amount:.3g} {name}"


def logged_scores(run: RunFacts) -> dict[str, Any]:
    """The checkpoints that were kept, and what training measured of the test set."""
    names = sorted({name for values in run.index.scores.values() for name in values})
    rows = [
        (name, name == run.checkpoint, [values.get(metric, math.nan) for metric in names])
        for name, values in sorted(run.index.scores.items())
        if values
    ]
    test = run.last("test")
    scores = test.get("scores")
    return {
        "label": run.label,
        "metrics": [_NAMES.get(name, name) for name in names],
        "rows": rows,
        "test": [
            (str(score.get("name")), number(score.get("value")), str(score.get("signature")))
            for score in (scores if isinstance(scores, list) else ())
            if isinstance(score, dict)
        ],
        "test_how": f"{test.get('checkpoint')}, beam {test.get('beam')}",
    }


def comparisons(
    known: Sequence[tuple[RunFacts, Translated]],
) -> list[tuple[str, str, list[Comparison] | None]]:
    """(baseline, system, results) of the first run with each of the others."""
    if len(known) < 2:
        return []
    (first, base), *others = known
    assert first.config is not None
    data = first.config.data
    corpus = data.test if base.split == "test" else data.valid
    assert corpus is not None, "it was translated"
    _, lang = data.langs_of(corpus)  # as the scores themselves have it
    return [(first.label, run.label, compare_runs(base, found, lang)) for run, found in others]


def by_lines(
    known: Sequence[tuple[RunFacts, Translated]],
) -> list[list[tuple[RunFacts, Translated]]]:
    """The runs, those that translated the same lines together; in the order of the first ones."""
    families: list[list[tuple[RunFacts, Translated]]] = []
    for item in known:
        family = next((one for one in families if same_lines(one[0][1], item[1])), None)
        if family is None:
            families.append([item])
        else:
            family.append(item)
    return families


def sample_groups(
    known: Sequence[tuple[RunFacts, Translated]],
) -> list[tuple[str, str, list[Sample]]]:
    """Heading, explanation and samples of each group.

    Runs that translated the same lines show them side by side; where there are several such
    families each has groups of its own, under the names of its runs.
    """
    families = by_lines(known)
    groups = []
    for family in families:
        names = ", ".join(run.label for run, _ in family)
        for name, why, samples in _family_groups(family):
            groups.append((f"{names}: {name}" if len(families) > 1 else name, why, samples))
    return groups


def _family_groups(
    same: Sequence[tuple[RunFacts, Translated]],
) -> list[tuple[str, str, list[Sample]]]:
    """The groups of runs that translated the same lines."""
    first = same[0][1]
    count = len(first.sources)
    spread = [n * count // min(SAMPLES, count) for n in range(min(SAMPLES, count))]
    groups = [("Samples", "evenly spread over the set", spread)]
    scores = [found.sentence for _, found in same]
    if len(same) > 1:
        gap = [max(values) - min(values) for values in zip(*scores, strict=True)]
        order = [n for n in sorted(range(count), key=lambda n: -gap[n]) if gap[n] > 0]
        groups.append(("Largest differences", "where the runs' chrF differs most", order[:WORST]))
    else:
        order = sorted(range(count), key=lambda n: scores[0][n])
        bad = [n for n in order if first.found[n].text != first.references[n]]
        groups.append(("Worst", "lowest chrF first", bad[:WORST]))
    longest = sorted(range(count), key=lambda n: -len(first.sources[n]))[:LONGEST]
    groups.append(("Longest", "by the length of the source", longest))
    return [
        (name, why, [_sample(same, n) for n in places]) for name, why, places in groups if places
    ]


def _sample(same: Sequence[tuple[RunFacts, Translated]], place: int) -> Sample:
    first = same[0][1]
    reference = first.references[place]
    outputs, lacking = [], [("same", visible(reference))]
    for run, found in same:
        translation = found.found[place]
        segments, missing = marked(translation.text, reference)
        outputs.append(Output(run.label, segments, found.sentence[place], translation.flags()))
        if len(same) == 1:
            lacking = missing
    equal = all(found.found[place].text == reference for _, found in same)
    return Sample(first.numbers[place], visible(first.sources[place]), lacking, outputs, equal)


def logged_samples(runs: Sequence[RunFacts]) -> list[tuple[str, list[Sample]]]:
    """What the last validation of each run wrote into its log."""
    groups = []
    for run in runs:
        samples, found = [], run.last("valid").get("samples")
        for count, one in enumerate(found if isinstance(found, list) else (), 1):
            if isinstance(one, dict):
                texts = [str(one.get(key, "")) for key in ("source", "output", "reference")]
                segments, missing = marked(texts[1], texts[2])
                output = Output(run.label, segments, math.nan, [])
                equal = texts[1] == texts[2]
                samples.append(Sample(count, visible(texts[0]), missing, [output], equal))
        if samples:
            groups.append((run.label, samples))
    return groups


# ---- settings and environment -----------------------------------------------------------------


def settings_table(runs: Sequence[RunFacts]) -> list[tuple[str, list[str], bool]]:
    """(key, value in each run, whether to mark it): all of one run, and first what differs.

    Of one run what is not the default is marked; of several, what differs.
    """
    flat = [dict(flattened(run.settings)) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    defaults = _defaults()
    rows = []
    for key in keys:
        values = [values.get(key, "–") for values in flat]
        if len(runs) > 1:
            mark = len(set(values)) > 1
        else:
            mark = key in defaults and defaults[key] != values[0]
        rows.append((key, values, mark))
    return sorted(rows, key=lambda row: not row[2]) if len(runs) > 1 else rows


def flattened(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as "section.key", value as text."""
    for key, value in settings.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for place, item in enumerate(value):
                entry = f"{name}." if len(value) == 1 else f"{name}.{place}."
                yield from flattened(mapping(item), entry)
        else:
            yield name, "null" if value is None else str(value)


def _defaults() -> dict[str, str]:
    """Of the keys that have one."""
    found = {}
    for section, kind in RunConfig.model_fields.items():
        fields = getattr(kind.annotation, "model_fields", None)
        for key, info in ({section: kind} if fields is None else fields).items():
            if not info.is_required():
                name = key if fields is None else f"{section}.{key}"
                value = info.get_default(call_default_factory=True)
                plain = list(value) if isinstance(value, tuple) else value
                found[name] = "null" if plain is None else str(plain)
    return found


def environment(run: RunFacts) -> dict[str, Any]:
    """On what it ran, and how to do it again."""
    begin, end = run.last("begin"), run.last("end")
    threads, ranks = begin.get("threads"), begin.get("ranks")
    versions, sums = (mapping(run.meta.get(name)) for name in ("versions", "text_hashes"))
    facts = [
        ("directory", str(run.path)),
        ("device", begin.get("device")),
        ("processes", begin.get("ranks")),
        ("threads", begin.get("cpu") or threads),
        ("seed", run.settings.get("seed")),
        *((f"{name} version", version) for name, version in versions.items()),
        ("begun", begin.get("time")),
        ("ended", end.get("time")),
        ("resumed", len(run.of_kind("resume")) or None),
        ("checkpoint used", run.checkpoint),
    ]
    pinned = f" --set threads={threads}" if isinstance(threads, int) else ""
    several = isinstance(ranks, int) and ranks > 1
    start = f"torchrun --nproc-per-node {ranks} -m " if several else ""
    config = shlex.quote(str(run.path / "config.yaml"))
    again = shlex.quote(f"{run.path}-again")
    return {
        "label": run.label,
        "facts": [(name, str(value)) for name, value in facts if value not in (None, "")],
        "hashes": list(sums.items()),
        "command": f"{start}mttrain train --config {config} --set run_dir={again}{pinned}",
    }
