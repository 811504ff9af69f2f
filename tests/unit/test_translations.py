"""Translations as lines, loops, and the summary."""

from __future__ import annotations

import pytest

from mttrain.translations import (
    Summary,
    TranslatedHypothesis,
    Translation,
    has_loop,
    lines_warning,
    output_lines,
)


def translation(line: int = 1, text: str = "x", **flags: object) -> Translation:
    hypothesis = TranslatedHypothesis(text, -1.5, -0.5, True, (7, 8))
    return Translation(line, "source", (hypothesis,), **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([5] * 3, False),  # really really really
        ([5] * 9, True),
        ([5] * 8, False),
        (list(range(40)), False),
        ([1, 2, 3] * 4, True),
        ([1, 2, 3] * 3, False),
        ([9, 8, 7, *range(10), *range(10), *range(10), *range(10), 4], True),
        ([*range(11)] * 4, False),  # a block longer than is looked for
        ([1, 2] * 3 + [9] + [1, 2] * 3, False),
        ([], False),
    ],
)
def test_loops(tokens: list[int], looped: bool) -> None:
    """S01: counts what repeats at length, and leaves what people say three times."""
    assert has_loop(tokens) is looped


def test_summary_counts_and_names_lines() -> None:
    """T14, S03, S08, S14: whatever was cut, limited, looped or lost is told with line numbers."""
    summary = Summary()
    for line in range(1, 12):
        summary.add(translation(line, source_cut=True))
    summary.add(translation(12, text=" "))
    summary.add(translation(13, text="", blank=True))
    summary.replaced.append(4)
    text = summary.text()
    assert text.startswith("13 lines, 1 of them blank, in ")
    assert "warning: 11 lines had more subwords than the limit" in text
    assert "line 1, 2, 3, 4, 5 and 6 more" in text
    assert "warning: 1 line came out empty: line 12" in text
    assert "not UTF-8" in text
    assert "output limit" not in text and "loop" not in text


def test_a_warning_about_lines() -> None:
    assert lines_warning([7], "fell") == "warning: 1 line fell: line 7"
    assert lines_warning(range(1, 8), "x") == "warning: 7 lines x: line 1, 2, 3, 4, 5 and 2 more"


def test_a_clean_summary_is_one_line() -> None:
    summary = Summary()
    summary.add(translation())
    assert len(summary.text().splitlines()) == 1


def test_json_is_one_line_and_keeps_every_character() -> None:
    """A text with U+2028, quotes and emoji is one JSON line, not escaped beyond need."""
    [line] = output_lines(translation(text='a\u2028"b" 👍'), layout="jsonl")
    assert "\n" not in line and "👍" in line


def test_one_line_is_singular() -> None:
    """The summary said "1 line were cut"."""
    assert (
        lines_warning([4], "were cut at the limit")
        == "warning: 1 line was cut at the limit: line 4"
    )
    assert lines_warning([4, 5], "were cut").startswith("warning: 2 lines were cut")
