"""A report gathers what there is, from any run directory, and shows foreign text as text."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mttrain.errors import CheckpointError, ConfigError, DataError
from mttrain.metrics import score_corpus
from mttrain.report import (
    Translated,
    chosen_split,
    compare_runs,
    labels,
    lengths,
    load_run,
    number,
    translate_run,
)
from mttrain.report_page import page
from mttrain.report_parts import (
    comparisons,
    duration,
    flattened,
    headline,
    logged_scores,
    marked,
    sample_groups,
    settings_table,
    visible,
)
from tests.integration.report_help import PAIRS, made_run, write_log

VOID = {"meta", "link", "br", "wbr", "hr", "img", "input", "image", "path", "use", "rect", "circle"}


class Checker(HTMLParser):
    """Collects elements and text, and asserts that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, random_run: Path) -> Path:
    """Read-only."""
    return made_run(tmp_path_factory.mktemp("made"), "first", random_run)


@pytest.fixture(scope="module")
def translated(run: Path) -> Translated:
    found = translate_run(load_run(run, "first"), "valid", 100, device="cpu")
    assert found is not None
    return found


# ---- text -------------------------------------------------------------------------------------


def test_marked_words() -> None:
    """Stops marks on the wrong side or at the wrong words."""
    extra, missing = marked("Er sieht den Hund.", "Er sah den Hund nicht.")
    assert [text for kind, text in extra if kind == "extra"] == ["sieht"]
    assert [text for kind, text in missing if kind == "missing"] == ["sah", "nicht"]
    assert "".join(text for _, text in extra) == "Er sieht den Hund."
    assert "".join(text for _, text in missing) == "Er sah den Hund nicht."


def test_marked_letters_where_no_spaces_are() -> None:
    extra, _ = marked("我爱你们", "我爱他们")
    assert [text for kind, text in extra if kind == "extra"] == ["你"]


@pytest.mark.parametrize(("one", "other"), [("", "a b"), ("a b", ""), ("", ""), ("a " * 999, "b")])
def test_marked_takes_any_text(one: str, other: str) -> None:
    extra, missing = marked(one, other)
    assert all(text for _, text in [*extra, *missing]) or not (one and other)


def test_visible_spells_out_what_steers() -> None:
    """Stops a right-to-left override or an escape from reaching the page."""
    shown = visible("a\x1b\x00\u202eb\u2066\u2028\u200f")
    assert shown.isprintable()
    assert shown.startswith("a␛␀⟨U+202E⟩b")
    assert visible("شكرا é 日本") == "شكرا é 日本"


def test_visible_cuts_and_counts() -> None:
    assert visible("x" * 5000, 100) == "x" * 100 + " … (4,900 more characters)"


def test_durations() -> None:
    assert [duration(x) for x in (0.5, 59, 90, 5400, 1e7)] == [
        "0.5 s", "59 s", "1.5 min", "1.5 h", "2,778 h",
    ]  # fmt: skip


def test_numbers_of_a_log() -> None:
    assert number("inf") == math.inf
    assert number(3) == 3.0
    for other in (None, True, "x", [], {}, 10**400):
        assert math.isnan(number(other))


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    """Two runs of the same name in different folders must not get one label."""
    assert labels([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert labels([tmp_path / "x"]) == ["x"]


def test_flattened() -> None:
    settings = {"a": {"b": None, "c": [1, 2]}, "d": [{"e": 1}], "f": [{"g": 1}, {"g": 2}]}
    assert dict(flattened(settings)) == {
        "a.b": "null", "a.c": "[1, 2]", "d.e": "1", "f.0.g": "1", "f.1.g": "2",
    }  # fmt: skip


# ---- gathering --------------------------------------------------------------------------------


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_run(tmp_path / "none", "x")
    with pytest.raises(CheckpointError, match=r"no log\.jsonl"):
        load_run(tmp_path, "x")


def test_torn_line_is_no_matter_and_a_damaged_one_is_named(run: Path, tmp_path: Path) -> None:
    log = (run / "log.jsonl").read_text(encoding="utf-8")
    (tmp_path / "log.jsonl").write_text(log + '{"kind": "tr', encoding="utf-8")
    assert load_run(tmp_path, "x").records == load_run(run, "x").records
    (tmp_path / "log.jsonl").write_text("nothing\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        load_run(tmp_path, "x")


def test_settings_come_from_the_log_where_the_file_is_gone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes((run / "log.jsonl").read_bytes())
    facts = load_run(tmp_path, "x")
    assert facts.settings == load_run(run, "x").settings
    assert facts.config is None
    assert len(facts.notes) == 2  # neither settings nor a model
    assert translate_run(facts, "valid", 10) is None


def test_curves(run: Path) -> None:
    facts = load_run(run, "x")
    x, y = facts.curve("train", "loss")
    assert x == list(range(1, 41))
    assert math.isnan(y[6])
    assert y[7] == 1.0
    assert facts.curve("train", "nothing") == ([], [])
    assert "update 40" in facts.state()


def test_lines_are_spread_and_scored(run: Path, translated: Translated) -> None:
    """Scores must be those of the lines shown; fewer lines are spread over the whole set."""
    assert translated.numbers == list(range(1, len(PAIRS) + 1))
    assert translated.references == [target for _, target in PAIRS]
    again = score_corpus(translated.texts, [translated.references], lang="de")
    assert [s.value for s in translated.scores] == pytest.approx([s.value for s in again])
    assert any(score.ci for score in translated.scores)
    some = translate_run(load_run(run, "x"), "valid", 3, device="cpu")
    assert some is not None
    assert some.numbers == [1, 3, 6]
    assert some.total == len(PAIRS)
    assert some.texts == [translated.texts[n - 1] for n in some.numbers]


def test_heat_maps_are_of_short_sentences_that_were_translated(translated: Translated) -> None:
    assert 1 <= len(translated.heats) <= 4
    for heat in translated.heats:
        assert max(heat.panel.weights.shape) <= 80
        np.testing.assert_allclose(heat.panel.weights.sum(1), 1, rtol=1e-5)
        assert heat.source.strip()


def test_comparison_needs_the_same_lines(translated: Translated, run: Path) -> None:
    results = compare_runs(translated, translated, "de")
    assert results is not None
    assert [result.delta for result in results] == [0.0, 0.0, 0.0]
    other = translate_run(load_run(run, "x"), "valid", 3, device="cpu")
    assert other is not None
    assert compare_runs(translated, other, "de") is None


def test_a_comparison_is_made_like_the_scores(tmp_path: Path, random_run: Path) -> None:
    """Text of another language than the main target had one tokenizer of BLEU in the table of
    scores and another one in the comparison: two figures that do not compare."""
    folder = tmp_path / "made"
    text = {"source": str(folder / "text.src"), "target": str(folder / "text.tgt")}
    for split in ("valid", "test"):
        data = {split: {**text, "target_lang": "zh"}}
        facts = load_run(made_run(folder, split, random_run, data=data), split)
        found = translate_run(facts, split, 4, device="cpu")  # type: ignore[arg-type]
        assert found is not None
        [(_, _, results)] = comparisons([(facts, found), (facts, found)])
        assert results is not None
        bleu = [x.signature for x in (found.scores[0], results[0])]
        assert all("tok:zh" in signature for signature in bleu)


def test_missing_text_is_told(run: Path, tmp_path: Path, random_run: Path) -> None:
    moved = made_run(tmp_path, "moved", random_run)
    (tmp_path / "text.tgt").unlink()
    facts = load_run(moved, "moved")
    assert translate_run(facts, "valid", 10, device="cpu") is None
    assert any("text.tgt" in note for note in facts.notes)
    text = page([facts], [None])
    assert "text.tgt" in text
    assert "Samples of the last validation" in text


def test_damaged_model_is_told(tmp_path: Path, random_run: Path) -> None:
    run = made_run(tmp_path, "broken", random_run)
    (weights,) = run.glob("checkpoints/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    facts = load_run(run, "broken")
    assert translate_run(facts, "valid", 10, device="cpu") is None
    assert "model.safetensors" in facts.notes[-1]


def test_split(run: Path) -> None:
    facts = load_run(run, "x")
    assert chosen_split(facts, None) == "valid"
    with pytest.raises(ConfigError, match="no test set"):
        chosen_split(facts, "test")


def test_lengths_are_those_of_the_store(tmp_path: Path, random_run: Path) -> None:
    """Stops a histogram of another corpus: the store must be the one the log speaks of."""
    run = made_run(tmp_path, "stored", random_run)
    corpora = [{"files": ["a", "b"], "lines": 3, "pairs": 3, "sha256": ["1", "2"]}]
    (run / "data").mkdir()
    (run / "data" / "train-0.json").write_text(json.dumps({"corpora": corpora}))
    for side, offsets in (("source", [0, 2, 5, 9]), ("target", [0, 1, 3, 6])):
        np.array(offsets, dtype=np.int64).tofile(run / "data" / f"train-0.{side}.offsets")
    log = [*load_run(run, "x").records, {"kind": "encoded", "step": 0, "corpora": corpora}]
    write_log(run / "log.jsonl", log)
    found = lengths(load_run(run, "x"))
    assert {side: values.tolist() for side, values in found.items()} == {
        "source": [2, 3, 4],
        "target": [1, 2, 3],
    }
    other: list[dict[str, Any]] = [{**log[-1], "corpora": [{**corpora[0], "sha256": ["1", "3"]}]}]
    write_log(run / "log.jsonl", other)
    assert lengths(load_run(run, "x")) == {}
    write_log(run / "log.jsonl", log)
    (run / "data" / "train-0.source.offsets").write_bytes(b"")
    assert lengths(load_run(run, "x")) == {}


# ---- the page ---------------------------------------------------------------------------------


def test_page_is_whole_and_the_same_twice(run: Path, translated: Translated) -> None:
    facts = load_run(run, "first")
    text = page([facts], [translated])
    assert text == page([load_run(run, "first")], [translated])
    found = Checker(text)
    assert len(found.ids) == len(set(found.ids))
    for name, value in found.attributes:
        if name in ("href", "xlink:href", "src") and value is not None:
            assert value.startswith(("#", "data:"))
            assert not value.startswith("#") or value[1:] in found.ids
    assert not re.search(r"https?://|@import|url\((?!#)", text.replace("http://www.w3.org", ""))


def test_hostile_text_is_text(run: Path, translated: Translated) -> None:
    """Stops a sentence, a path or a log record from running code or steering the page."""
    found = Checker(page([load_run(run, "<script>alert(2)</script>")], [translated]))
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in found.text
    assert "<script>alert(2)</script>" in found.text
    assert "<b>look</b>" in found.text
    for sign in "\x00\x07\x1b\u202e\u2028":
        assert sign not in found.text
    assert "more characters" in found.text


def test_page_of_almost_nothing(tmp_path: Path) -> None:
    """A run that has just begun, or whose log is nonsense, gives a page too."""
    write_log(tmp_path / "log.jsonl", [])
    Checker(page([load_run(tmp_path, "empty")], [None]))
    odd: list[dict[str, Any]] = [
        {"kind": kind, "step": step, "loss": value, "splits": value, "samples": value,
         "scores": value, "config": value, "threads": value, "warnings": value, "cpu": value,
         "corpora": value, "percentiles": value, "ranks": value, "elapsed": value}
        for kind in ("corpus", "begin", "train", "valid", "test", "end", "encoded", 7)
        for step in (1, "x", None)
        for value in ("nan", None, [], [None], {}, {"a": None}, -1, 10**30, "<b>")
    ]  # fmt: skip
    for shift in range(9):
        write_log(tmp_path / "log.jsonl", odd[shift:])
        write_log(
            tmp_path / "log.jsonl", [record for n, record in enumerate(odd) if n % 9 == shift]
        )
        Checker(page([load_run(tmp_path, "odd")], [None]))


def test_one_run_marks_what_is_no_default(run: Path) -> None:
    rows = {key: mark for key, _, mark in settings_table([load_run(run, "x")])}
    assert rows["model.d_model"]
    assert not rows["model.dropout"]
    assert not rows["optim.betas"]


def test_several_runs(run: Path, translated: Translated, tmp_path: Path, random_run: Path) -> None:
    """Curves of both, the settings that differ first, the same sentences, one significance test."""
    second = made_run(tmp_path, "second", random_run, steps=25, optim={"lr": 2e-3})
    facts = load_run(second, "second")
    text = page([load_run(run, "first"), facts], [translated, translated])
    found = Checker(text)
    assert len(found.ids) == len(set(found.ids))
    assert "second against first" in found.text
    differing = {key for key, _, mark in settings_table([load_run(run, "first"), facts]) if mark}
    assert {"optim.lr", "run_dir"} <= differing
    assert "model.d_model" not in differing
    assert html.escape("update 20") in text


def test_name_that_is_no_text(run: Path) -> None:
    """A folder may have a name that is not UTF-8; the page must be written all the same."""
    facts = [load_run(run, label) for label in ("\udcff\x1b", "b")]
    page(facts, [None, None]).encode("utf-8")


def test_runs_of_other_lines_are_not_compared(run: Path, translated: Translated) -> None:
    some = translate_run(load_run(run, "x"), "valid", 3, device="cpu")
    text = page([load_run(run, "one"), load_run(run, "other")], [translated, some])
    assert "cannot be compared" in Checker(text).text


def test_runs_of_other_sets_show_their_own_samples(
    run: Path, translated: Translated, tmp_path: Path, random_run: Path
) -> None:
    """Stops a page that shows the first run's lines only; and lines that are one in source but have
    other references count as another set."""
    some = translate_run(load_run(run, "x"), "valid", 3, device="cpu")
    assert some is not None
    other = replace(some, references=["another reference", *some.references[1:]])
    facts = [load_run(run, name) for name in ("one", "other", "third", "fourth")]
    groups = sample_groups(list(zip(facts, [translated, some, other, some], strict=True)))
    shown = {name: samples for name, _, samples in groups}
    for names in ("one", "other, fourth", "third"):
        labels_there = {tuple(o.label for o in s.outputs) for s in shown[f"{names}: Samples"]}
        assert labels_there == {tuple(names.split(", "))}
    assert shown["third: Samples"][0].reference != shown["other, fourth: Samples"][0].reference
    found = Checker(page(facts[:2], [translated, some]))
    assert "Each set is shown on its own below" in found.text
    assert "one on 8 of 8 lines" in found.text and "other on 3 of 8 lines" in found.text
    alike = Checker(page(facts[:2], [translated, translated])).text
    assert "Each set is shown" not in alike and "report, on 8 of 8 lines" in alike


def test_perplexity_is_that_of_the_scored_checkpoint(run: Path, translated: Translated) -> None:
    """Stops the perplexity of the last validation beside the BLEU of another checkpoint."""
    facts = load_run(run, "x")
    assert facts.checkpoint is not None
    scores = {facts.checkpoint: {"bleu": 30.0, "nll": 2.0}, "step-9": {"bleu": 1.0, "nll": 5.0}}
    facts.index = replace(facts.index, scores=scores)
    cards = {what: (figure, detail) for what, figure, detail in headline(facts, translated)}
    assert cards["Perplexity"] == ("7.39", f"validation set, {facts.checkpoint}")
    cards = {what: (figure, detail) for what, figure, detail in headline(facts, None)}
    assert cards["Perplexity"] == ("1.10", "validation, last") and "last" in cards["BLEU"][1]
    facts.index = replace(facts.index, scores={})
    assert "Perplexity" not in {what for what, _, _ in headline(facts, translated)}


def test_metrics_have_one_name_each(run: Path) -> None:
    """Stops the keys of the index from standing as headings beside the names of the metrics."""
    facts = load_run(run, "x")
    scores = {"step-1": {"bleu": 30.0, "chrf": 50.0, "nll": 2.0}}
    facts.index = replace(facts.index, scores=scores)
    assert logged_scores(facts)["metrics"] == ["BLEU", "chrF", "NLL"]
    text = page([facts], [None])
    for name in ("BLEU", "chrF", "NLL"):
        assert f'<th class="n">{name}</th>' in text


def test_signatures_may_break_and_are_escaped(run: Path, translated: Translated) -> None:
    score = replace(translated.scores[0], signature="nrefs:1|<b>|c")
    text = page([load_run(run, "x")], [replace(translated, scores=[score])])
    assert "nrefs:1|<wbr>&lt;b&gt;|<wbr>c" in text
