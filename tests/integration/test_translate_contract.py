"""Lines in, lines out: the promises of `translate`, with a model that copies its source.

The copier is handed to the translator as a part: what comes out must be what went in, line by
line, so any line that is lost, moved, cut or invented shows.
"""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mttrain.checkpoint import ModelBundle
from mttrain.dataset import Example, collate
from mttrain.errors import ConfigError, DataError
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer, train_tokenizer
from mttrain.translator import Summary, TranslateOptions, Translation, Translator, output_lines

TEXT = ["The house is small .", "A dog runs to the house !", "zwei drei vier", "Hello . Bye ."] * 5


@dataclass(frozen=True)
class CopyState:
    src: Tensor  # [R, S]
    step: int

    def reorder(self, rows: Tensor) -> CopyState:
        return replace(self, src=self.src[rows])


class Copier(nn.Module):
    """Gives almost all probability to the next source token; `favour` ids get more than that.

    Model and stepper in one.
    """

    def __init__(self, size: int, favour: Sequence[int] = (), most_rows: int = 10**9) -> None:
        super().__init__()
        self.lm_head = nn.Linear(1, size)
        self.max_positions, self.vocab_size = None, size
        self.favour, self.most_rows = list(favour), most_rows
        self.sources: list[list[int]] = []
        self.first_inputs: set[int] = set()

    def start(self, src: Tensor) -> CopyState:
        if len(src) > self.most_rows:
            raise torch.OutOfMemoryError("pretended")
        assert src.dtype == torch.int64
        self.sources += [[i for i in row if i != PAD_ID] for row in src.tolist()]
        return CopyState(src, 0)

    def step(self, tokens: Tensor, state: CopyState) -> tuple[Tensor, CopyState]:
        if state.step == 0:
            self.first_inputs |= set(tokens.tolist())
        at = min(state.step, state.src.shape[1] - 1)
        logits = torch.zeros(len(tokens), self.lm_head.out_features)
        logits.scatter_(1, state.src[:, at, None], 20.0)
        logits[:, self.favour] = 40.0
        return logits.log_softmax(-1), replace(state, step=state.step + 1)

    def reorder(self, state: CopyState, rows: Tensor, kept: Tensor | None) -> CopyState:
        return state.reorder(rows)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=300)


def copying(
    tokenizer: Tokenizer, *, meta: dict[str, Any] | None = None, **parts: Any
) -> Translator:
    model: Any = Copier(tokenizer.size, **parts)
    content = {"source_lang": "en", "target_lang": "de", "max_length": 256, **(meta or {})}
    bundle = ModelBundle(model, tokenizer, tokenizer, content, Path("copier"))
    return Translator(bundle, make_stepper=lambda model, dtype: model)


def flagged(found: Sequence[Translation], name: str) -> list[int]:
    return [t.line for t in found if getattr(t, name)]


# --- order and count --------------------------------------------------------------------------


def numbered_lines() -> list[str]:
    """1,300 numbered lines of very different lengths, 24 % of them blank, some twice."""
    random.seed(7)
    lines = [f"{n} " + "word " * random.randint(0, 12) + "." for n in range(1300)]
    for n in random.sample(range(1300), 312):
        lines[n] = random.choice(["", " ", "\t", "\u3000"])
    for n in random.sample(range(1, 1300), 50):
        lines[n] = lines[n - 1]
    return lines


@pytest.mark.parametrize(
    "options",
    [
        TranslateOptions(beam=1, batch_size=16, window=1024),
        TranslateOptions(beam=1, batch_size=16, window=37),
        TranslateOptions(beam=1, batch_tokens=200, window=300),
        TranslateOptions(beam=2, batch_tokens=2000),
    ],
    ids=["size", "small window", "tokens", "beam"],
)
def test_line_i_belongs_to_line_i(tokenizer: Tokenizer, options: TranslateOptions) -> None:
    """D07: sorting by length must be undone, and blank lines must not shift the others."""
    lines = numbered_lines()
    found = list(copying(tokenizer).translate_lines(lines, options))
    assert [t.text for t in found] == [line if line.strip() else "" for line in lines]
    assert [t.line for t in found] == list(range(1, 1301))
    assert [t.source for t in found] == lines


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("batch", [1, 8])
def test_blank_lines(tokenizer: Tokenizer, beam: int, batch: int) -> None:
    """T08: an empty line gives an empty line in its place, and never reaches the model; so do
    only empty lines, and no lines at all."""
    translator = copying(tokenizer)
    model: Any = translator.models[0]
    options = TranslateOptions(beam=beam, batch_size=batch)
    assert translator.translate(["Hello .", "", "Bye ."], options) == ["Hello .", "", "Bye ."]
    assert len(model.sources) == 2
    assert translator.translate(["", " \t", "\u2003"], options) == ["", "", ""]
    assert translator.translate([], options) == []
    assert len(model.sources) == 2
    blank = next(translator.translate_lines([""], options, prefixes=["Ein"]))
    assert blank.blank and blank.text == "" and not blank.empty


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_over_long_lines(tokenizer: Tokenizer, beam: int, batch: int) -> None:
    """S08, S09: the first, the fourth and the last line are too long: 10 lines come out, those
    three from sources cut to exactly the limit with EOS, and the summary names them."""
    lines = [f"dog {n}" for n in range(10)]
    for n in (0, 3, 9):
        lines[n] = f"The house {n} " * 30
    translator, summary = copying(tokenizer), Summary()
    options = TranslateOptions(beam=beam, batch_size=batch, max_source_length=20)
    found = list(translator.translate_lines(lines, options))
    for translation in found:
        summary.add(translation)
    for n, translation in enumerate(found):
        wanted = lines[n]
        if n in (0, 3, 9):
            wanted = tokenizer.decode(tokenizer.encode(wanted)[:19])
        assert translation.text == wanted
    model: Any = translator.models[0]
    longest = [ids for ids in model.sources if len(ids) >= 20]
    assert [len(ids) for ids in longest] == [20] * 3 and {ids[-1] for ids in longest} == {EOS_ID}
    assert flagged(found, "source_cut") == [1, 4, 10]
    assert "3 lines had more subwords than the limit" in summary.text()
    assert "line 1, 4, 10" in summary.text()


def test_extremely_long_lines(tokenizer: Tokenizer) -> None:
    """T14: 10,000 words, 100,000 letters without a space and a 200 kB blob: one line each in
    seconds, cut at 1,000 subwords and marked."""
    random.seed(1)
    blob = "".join(random.choices(string.ascii_letters + string.digits + "+/", k=200_000))
    lines = ["word " * 10_000, "a" * 100_000, "ok .", blob]
    started = time.perf_counter()
    found = list(copying(tokenizer).translate_lines(lines, TranslateOptions(beam=1)))
    assert time.perf_counter() - started < 20
    assert [len(found[n].hypotheses[0].tokens) for n in (0, 1, 3)] == [999] * 3
    assert flagged(found, "source_cut") == [1, 2, 4]
    assert found[2].text == "ok ."


def test_an_error_inside_a_batch_loses_no_line(tokenizer: Tokenizer) -> None:
    """S09: a batch that does not fit into the device's memory is halved until it does."""
    lines = [f"dog {n}" for n in range(23)]
    translator = copying(tokenizer, most_rows=3)
    assert translator.translate(lines, TranslateOptions(beam=1, batch_size=16)) == lines


def test_a_line_too_large_for_the_memory_is_named(tokenizer: Tokenizer) -> None:
    """S09: one sentence that did not fit ended in a traceback that told neither line nor remedy."""
    found = copying(tokenizer, most_rows=0).translate_lines(["", "", "Hello ."])
    count = len(tokenizer.encode("Hello .")) + 1
    with pytest.raises(DataError, match=rf"Input line 3 \({count} subwords\) .*--split-long"):
        list(found)


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ({"beam": 5}, "Lower --beam or --max-source-length, or"),
        ({"beam": 1}, "Lower --max-source-length, or"),
        ({"sample": True}, "Lower --max-source-length, or"),
        ({"sample": True, "nbest": 8}, "Lower --candidates or --nbest or --max-source-length, or"),
    ],
)
def test_the_remedy_is_one(how: dict[str, Any], remedy: str, tokenizer: Tokenizer) -> None:
    """With --sample the message named --beam, which has no effect there."""
    found = copying(tokenizer, most_rows=0).translate_lines(["Hello ."], TranslateOptions(**how))
    with pytest.raises(DataError) as caught:
        list(found)
    assert remedy in str(caught.value)


def test_batch_size_one_answers_line_by_line(tokenizer: Tokenizer) -> None:
    """S18: the first answer must not wait for the second line; larger windows read ahead."""
    read: list[int] = []

    def typed() -> Iterator[str]:
        for n in range(3):
            read.append(n)
            yield f"dog {n}"

    answers = copying(tokenizer).translate_lines(typed(), TranslateOptions(beam=1, batch_size=1))
    for n in range(3):
        assert next(answers).text == f"dog {n}"
        assert read == list(range(n + 1))


# --- what may come out ------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 5])
def test_the_model_wants_a_line_end(tokenizer: Tokenizer, beam: int) -> None:
    """K12: LF and CR are among the 256 bytes; a model that prefers them gives one line all the
    same. Other separators are text."""
    ids = sorted(tokenizer.newline_ids)
    assert len(ids) >= 2
    translator = copying(tokenizer, favour=ids)
    lines = ["Hello .", "Bye ."]
    assert translator.translate(lines, TranslateOptions(beam=beam)) == lines
    forced = copying(tokenizer, favour=tokenizer.encode("\x0b"))
    found = list(forced.translate_lines(["Bye ."], TranslateOptions(beam=beam, max_length=3)))
    assert found[0].text == "\x0b\x0b\x0b"
    for layout in ("text", "jsonl"):
        for line in output_lines(found[0], layout=layout):  # type: ignore[arg-type]
            assert "\n" not in line and "\r" not in line
    separators = ["a\u2028b", "a\x85b", "a\x0cb"]
    assert copying(tokenizer).translate(separators, TranslateOptions(beam=beam)) == separators


def test_a_forced_line_end_becomes_a_space(tokenizer: Tokenizer) -> None:
    """K12: even where the ids of a line end are asked for, as a prefix, the output is one line."""
    found = copying(tokenizer).translate(["ab"], TranslateOptions(beam=1), prefixes=["x\ny"])
    assert len(found) == 1 and found[0].startswith("x y") and "\n" not in found[0]


@pytest.mark.parametrize("beam", [1, 5])
def test_the_model_wants_control_tokens(tokenizer: Tokenizer, beam: int) -> None:
    """K03, S20: a model whose favourites are <unk>, <pad> and <s> never prints them, nor a double
    space where one was."""
    translator = copying(tokenizer, favour=[UNK_ID, PAD_ID, BOS_ID])
    found = list(translator.translate_lines(["The house is small ."], TranslateOptions(beam=beam)))
    assert found[0].text == "The house is small ."
    assert not {PAD_ID, UNK_ID, BOS_ID, EOS_ID} & set(found[0].hypotheses[0].tokens)


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    """K11: an output limit in the middle of a character: valid text, one replacement sign, one
    line."""
    assert len(tokenizer.encode("你好")) == 6
    for limit, wanted in ((3, "你"), (4, "你\ufffd"), (5, "你\ufffd")):
        [text] = copying(tokenizer).translate(["你好"], TranslateOptions(beam=1, max_length=limit))
        assert text == wanted
        assert text.encode("utf-8").decode("utf-8") == text
    [emoji] = copying(tokenizer).translate(["👍"], TranslateOptions(beam=1, max_length=3))
    assert emoji == "\ufffd"


def test_literal_control_strings(tokenizer: Tokenizer) -> None:
    """The text "</s>" is text: it neither ends the output nor gets lost."""
    lines = ["press </s> to stop", "<pad> <unk> x", "a  b", " lead", "10\u00a0000\u202f€"]
    assert copying(tokenizer).translate(lines) == lines


def test_symbols_are_those_of_training(tokenizer: Tokenizer) -> None:
    """S22: source ids and the first decoder input in translation are what the training batches
    hold: ids and EOS, and BOS."""
    lines = ["The house is small .", "zwei"]
    translator = copying(tokenizer)
    translator.translate(lines, TranslateOptions(beam=1))
    model: Any = translator.models[0]
    ids = [[*tokenizer.encode(line), EOS_ID] for line in lines]
    arrays = [np.array(row) for row in ids]
    batch = collate([Example(a, a, n) for n, a in enumerate(arrays)])
    training = [[i for i in row if i != PAD_ID] for row in batch.source.tolist()]
    assert model.sources == training == ids
    assert model.first_inputs == set(batch.target_in[:, 0].tolist()) == {BOS_ID}


# --- options ----------------------------------------------------------------------------------


def test_long_lines_split_at_sentence_ends(tokenizer: Tokenizer) -> None:
    """split_long: parts end at sentence ends, hold at most the training length, and come out
    joined; short lines and a single long sentence are left alone."""
    sentences = ['"Hello ." He said .', "A dog runs !", "The house is small .", "Bye ."] * 3
    long = " ".join(sentences)
    single = ("The house " * 30).strip()
    translator = copying(tokenizer, meta={"max_length": 40})
    found = list(
        translator.translate_lines([long, "Bye .", single], TranslateOptions(split_long=True))
    )
    assert [t.text for t in found] == [long, "Bye .", single]
    assert found[0].pieces > 2 and [found[1].pieces, found[2].pieces] == [1, 1]
    assert found[0].hypotheses[0].finished and not found[0].source_cut
    model: Any = translator.models[0]
    parts = [tokenizer.decode(ids) for ids in model.sources]
    assert [len(ids) > 40 for ids in model.sources] == [part == single for part in parts]
    assert all(part.endswith((".", "!", '."')) for part in parts if part != single)
    whole = list(translator.translate_lines([long]))
    assert whole[0].pieces == 1 and whole[0].text == long


def test_nothing_is_cut_that_could_be_split(tokenizer: Tokenizer) -> None:
    """A source limit below the training length cut the parts: what did not reach the training
    length, but was too long to be read, lost its end though --split-long was given."""
    line = "The house is small . A dog runs ! Hello . Bye ."
    sentence = max(len(tokenizer.encode(s)) for s in ("The house is small .", " A dog runs !"))
    limit = sentence + 2
    assert limit < len(tokenizer.encode(line)) < 256
    for read in (limit, None):
        meta = {"max_length": 256 if read else limit}
        options = TranslateOptions(split_long=True, max_source_length=read)
        [found] = copying(tokenizer, meta=meta).translate_lines([line], options)
        assert found.text == line and found.pieces > 1 and not found.source_cut


def test_a_line_of_training_length_is_read_whole(tokenizer: Tokenizer) -> None:
    """S08: a model trained on sentences of up to 1,500 subwords read 1,000 of a line, also in its
    validation; forced scoring did the same. A model of short sentences still reads 1,000."""
    text = "z" * 1200
    assert len(tokenizer.encode(text)) == 1200
    for longest, cut in ((1500, False), (1200, True), (64, True)):
        engine = copying(tokenizer, meta={"max_length": longest})
        [found] = engine.translate_lines([text], TranslateOptions(beam=1))
        assert found.source_cut is cut
        assert len(found.text) == min(1200, max(longest, 1000) - 1)
    [short] = copying(tokenizer, meta={"max_length": 1500}).translate_lines(
        [text], TranslateOptions(beam=1, max_source_length=100)
    )
    assert len(short.text) == 99


def test_the_score_of_a_split_line_is_the_sum_of_its_parts(tokenizer: Tokenizer) -> None:
    """Each part has an end symbol of its own, and the length counts it."""
    parts = ["The house is small .", "A dog runs !"]
    options = TranslateOptions(beam=2, split_long=True, length_penalty=1.0)
    longest = max(len(tokenizer.encode(part)) for part in parts) + 1
    engine = copying(tokenizer, meta={"max_length": longest})
    alone = [t.hypotheses[0] for t in engine.translate_lines(parts, options)]
    [whole] = engine.translate_lines([" ".join(parts)], options)
    [best] = whole.hypotheses
    assert whole.pieces == 2
    assert best.score == pytest.approx(sum(h.score for h in alone), rel=1e-3)
    assert best.ranked == pytest.approx(best.score / sum(len(h.tokens) + 1 for h in alone))
    with pytest.raises(ConfigError, match="one output for a line, not nbest 2"):
        TranslateOptions(beam=2, nbest=2, split_long=True)


@pytest.mark.parametrize("lang", ["zh", "cmn_Hans", "yue", "jpn"])
def test_chinese_sentences_split_without_spaces(tokenizer: Tokenizer, lang: str) -> None:
    """split_long ends sentences at 。！？ and joins Chinese and Japanese output without a space,
    whichever code the language has."""
    line = "你好。「我们走！」好吗？" * 4
    translator = copying(tokenizer, meta={"max_length": 45, "target_lang": lang})
    [found] = translator.translate_lines([line], TranslateOptions(split_long=True))
    assert found.text == line and found.pieces >= 4
    model: Any = translator.models[0]
    parts = [tokenizer.decode(ids) for ids in model.sources]
    assert not [part for part in parts if part.startswith(("」", "？", "！", "。"))]


def test_forced_prefixes(tokenizer: Tokenizer) -> None:
    """Each output begins with its line's prefix; a blank prefix forces nothing; the count of
    prefixes must be that of the lines."""
    translator = copying(tokenizer)
    lines = ["The house is small .", "A dog runs", "zwei drei", "vier"]
    prefixes = ["zwei ", "", "A dog", "  "]
    for options in (TranslateOptions(beam=1), TranslateOptions(beam=3, batch_size=2, window=3)):
        found = translator.translate(lines, options, prefixes)
        assert found[0].startswith("zwei") and found[2].startswith("A dog")
        assert [found[1], found[3]] == [lines[1], lines[3]]
    for wrong in (prefixes[:3], [*prefixes, "x"]):
        with pytest.raises(DataError, match="prefixes"):
            translator.translate(lines, TranslateOptions(), wrong)


def test_written_lines(tokenizer: Tokenizer) -> None:
    """n-best text counts input lines from 0 and keeps a "|||" in the text apart; JSON lines hold
    the same."""
    lines = ["The house", "", "a ||| b"]
    options = TranslateOptions(beam=3, nbest=3)
    found = list(copying(tokenizer).translate_lines(lines, options))
    assert [output_lines(t) for t in found] == [["The house"], [""], ["a ||| b"]]
    for n, translation in enumerate(found):
        written = output_lines(translation, nbest=3)
        assert len(written) == len(translation.hypotheses)
        for line, hypothesis in zip(written, translation.hypotheses, strict=True):
            number, rest = line.split(" ||| ", 1)
            text, score, ranked = rest.rsplit(" ||| ", 2)
            assert (int(number), text) == (n, hypothesis.text)
            assert float(score) == pytest.approx(hypothesis.score, abs=1e-6)
            assert float(ranked) == pytest.approx(hypothesis.ranked, abs=1e-6)
        [line] = output_lines(translation, layout="jsonl", nbest=3)
        content = json.loads(line)
        assert content["line"] == n + 1 and content["source"] == lines[n]
        assert content["text"] == translation.text
        assert [h["ids"] for h in content["hypotheses"]] == [
            list(h.tokens) for h in translation.hypotheses
        ]
    assert json.loads(output_lines(found[1], layout="jsonl")[0])["flags"] == ["blank"]
    [scored] = output_lines(found[0], scores=True)
    assert scored.startswith("0 ||| The house ||| ")


def test_output_limit_and_loops_are_reported(tokenizer: Tokenizer) -> None:
    """S01, S14: an output that never ends is cut at 3 x source + 20, marked as cut and as looped,
    and the summary counts it; a neighbour is not touched."""
    letter = tokenizer.encode("z")
    endless = copying(tokenizer, favour=letter)
    summary = Summary()
    found = list(endless.translate_lines(["really really really", "ok"], TranslateOptions(beam=1)))
    for translation in found:
        summary.add(translation)
    for translation in found:
        source = len(tokenizer.encode(translation.source))
        assert translation.text == "z" * (3 * source + 20)
        assert translation.hit_limit and translation.looped
    assert "2 lines were cut at the output limit" in summary.text()
    assert "2 lines came out with a repeating loop" in summary.text()
    normal = list(copying(tokenizer).translate_lines(["really really really", "x " * 3]))
    assert not flagged(normal, "looped") and not flagged(normal, "hit_limit")
