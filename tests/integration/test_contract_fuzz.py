"""The translate contract under made-up input: any text, any bytes, any batches, any beam.

Three oracles. What a line is follows from the documented rules of reading, spelled out here on
bytes. A model that copies its source must give back each line as it was. A model with random
weights must answer a line as it answers that line alone. The cases are always the same ones
(`derandomize`), because two hypotheses that tie to the last digits may change places.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mttrain.checkpoint import Index, ModelBundle, load_model, save_checkpoint, write_index
from mttrain.cli import main
from mttrain.config import ModelConfig
from mttrain.model import Transformer
from mttrain.tokenizer import EOS_ID, Tokenizer
from mttrain.translations import has_loop
from mttrain.translator import TranslateOptions, Translation, Translator
from tests.integration.test_translate_contract import copying

BOM = b"\xef\xbb\xbf"
WORDS = [
    "the",
    " small",
    " house",
    " dog",
    "läuft",
    "狗",
    "我们",
    "🙂",
    "👩‍👩‍👧",
    ".",
    " 10\u00a0000",
    "e\u0301",
]
ODD = [
    "</s>", "<pad>", "<unk>", "<s>", "[PAD]", " ||| ", "▁", "Ġ", "@@ ", "\x00", "\x07", "\x0b",
    "\x0c", "\x1b[31m", "\x1c", "\x1d", "\x1e", "\x7f", "\x85", "\xa0", "\u200b", "\u200e",
    "\u2028", "\u2029", "\u3000", "\ufeff", "\ufffd", "\ufffe", "\U0010ffff", "\r", "\t", " ", "  ",
]  # fmt: skip
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\n")
TEXTS = st.lists(
    st.sampled_from(WORDS) | st.sampled_from(ODD) | st.text(CHARACTERS, max_size=6), max_size=8
).map("".join)
BLANKS = st.sampled_from(["", " ", "\t", "\u3000", "\x85", "\u2028", "\x1c \x0b", "\xa0\r"])
GIANTS = st.builds(
    lambda unit, times: unit * times,
    st.sampled_from(["the small house ", "a", "狗", "</s>", "\x00", "\u2028", "the dog . "]),
    st.integers(30, 200),
)
LINES = st.lists(TEXTS | TEXTS | BLANKS | GIANTS, max_size=12)
NOT_UTF8 = [b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80", b"\xfe\xff"]
RAW_LINES = st.builds(
    lambda before, wrong, after: before.encode() + wrong + after.encode(),
    TEXTS | BLANKS | GIANTS,
    st.sampled_from([b"", b"", b"", *NOT_UTF8]),
    TEXTS,
)
FILES = st.builds(
    lambda start, lines, last: start + b"".join(a + b for a, b in lines) + last,
    st.sampled_from([b"", BOM]),
    st.lists(st.tuples(RAW_LINES, st.sampled_from([b"\n", b"\n", b"\r\n"])), max_size=10),
    st.just(b"") | RAW_LINES,  # a last line without its end
)
BEAMS, SIZES = st.integers(1, 8), st.integers(1, 64)

# A block of tokens, written as characters, that comes again: see `has_loop`.
LOOP = re.compile(r"(.)\1{8}|(..)\2{4}|(.{3,10}?)\3{3}", re.DOTALL)
FIRST = re.compile(r"([\d,]+) lines?(?:, (\d+) of them blank)?, in \d+\.\d s \([\d.]+ lines/s\)")
WARNING = re.compile(r"warning: ([\d,]+) lines? (.+): line ([\d, ]+?)(?: and [\d,]+ more)?")
KINDS = {
    "replaced": "held bytes that are not UTF-8",
    "source_cut": "had more subwords than the limit",
    "hit_limit": "cut at the output limit",
    "looped": "came out with a repeating loop",
    "empty": "came out empty",
}


def cases(count: int) -> settings:
    return settings(deadline=None, derandomize=True, max_examples=count)


@dataclass(frozen=True)
class Done:
    """What a command gave."""

    status: int
    out: bytes
    err: str

    def rows(self) -> list[str]:
        """The lines on stdout, each whole and UTF-8."""
        text = self.out.decode()
        assert not text or text.endswith("\n")
        assert "\r" not in text
        return text.split("\n")[:-1]


def command(*arguments: str, stdin: bytes = b"") -> Done:
    """Run a command in this process, with streams of bytes."""
    before = sys.stdin, sys.stdout, sys.stderr
    streams = [io.TextIOWrapper(io.BytesIO(data)) for data in (stdin, b"", b"")]
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        status = main(arguments)
        for stream in streams[1:]:
            stream.flush()
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    _, out, err = (stream.detach() for stream in streams)
    return Done(status, out.getvalue(), err.getvalue().decode())  # type: ignore[attr-defined]


def raw_lines(data: bytes) -> list[bytes]:
    """The lines of a file by the rules of docs/reliability.md."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    lines = [line.removesuffix(b"\r") for line in lines]
    return [lines[0].removeprefix(BOM), *lines[1:]] if lines else []


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.fixture(scope="module")
def tokenizer(random_run: Path) -> Tokenizer:
    return Tokenizer.load(random_run / "tokenizer.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def lively_run(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random weights so large that its outputs hang on their sources, and so drawn to
    the end symbol that some outputs end, some are empty, some loop and some meet the limit."""
    config = ModelConfig(
        d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0,
        tie="none", norm="pre",
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = Transformer(config, tokenizer.size, tokenizer.size)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
        decoder: Any = model.decoder
        decoder.layer_norm.bias.fill_(1.0)
        model.lm_head.weight[EOS_ID] = 0.4
    run = tmp_path_factory.mktemp("lively")
    meta = {"source_lang": "en", "target_lang": "de", "max_length": 64}
    path = save_checkpoint(run, 1, model, meta, (tokenizer, tokenizer), None)
    write_index(run, Index().added(path.name, {"bleu": 1.0}))
    return run


# ---- the command ------------------------------------------------------------------------------


def counted(err: str) -> dict[str, Any]:
    """The closing summary as numbers; anything else on stderr is a failure."""
    first, *others = err.splitlines()
    found = FIRST.fullmatch(first)
    assert found, first
    counts: dict[str, Any] = {"lines": int(found[1]), "blank": int(found[2] or 0)}
    for line in others:
        warning = WARNING.fullmatch(line)
        assert warning, line
        (kind,) = (name for name, words in KINDS.items() if words in warning[2])
        counts[kind] = int(warning[1]), [int(n) for n in warning[3].split(", ")]
    return counts


def expected(
    raw: Sequence[bytes], objects: Sequence[dict[str, Any]], tokenizer: Tokenizer, limit: int
) -> dict[str, Any]:
    """The same numbers, from the input and from the ids that came out."""
    numbers: dict[str, list[int]] = {kind: [] for kind in KINDS}
    blank = 0
    for line, item in zip(raw, objects, strict=True):
        text, number = line.decode(errors="replace"), item["line"]
        blank += not text.strip()
        as_characters = "".join(chr(0x100 + token) for token in item["ids"])
        for kind, holds in (
            ("replaced", not is_utf8(line)),
            ("source_cut", bool(text.strip()) and len(tokenizer.encode(text)) >= limit),
            ("hit_limit", not item["finished"]),
            ("looped", LOOP.search(as_characters) is not None),
            ("empty", bool(text.strip()) and not item["text"].strip()),
        ):
            if holds:
                numbers[kind].append(number)
    shown = {kind: (len(lines), lines[:5]) for kind, lines in numbers.items() if lines}
    return {"lines": len(raw), "blank": blank, **shown}


@cases(40)
@given(
    data=FILES,
    beam=BEAMS,
    size=SIZES,
    longest=st.sampled_from([1, 4, 30]),
    limit=st.sampled_from([2, 9, 60]),
    layout=st.sampled_from(["text", "scores", "nbest"]),
)
@example(b"", 1, 1, 4, 9, "text")
@example(BOM, 2, 1, 4, 9, "nbest")
@example(b"\r", 1, 3, 4, 9, "text")
@example(b"a\r\r\nb\r\r", 1, 3, 4, 9, "scores")
@example(b"\xff\n\n\xff\r\n", 3, 2, 30, 9, "scores")
@example("a\u2028b\x85c\rd\n\ufeffe\n".encode() * 4, 5, 3, 30, 60, "nbest")
def test_any_file(
    lively_run: Path,
    folder: Path,
    tokenizer: Tokenizer,
    data: bytes,
    beam: int,
    size: int,
    longest: int,
    limit: int,
    layout: str,
) -> None:
    """T01, T03, T04, T05, T06, T07, T08, T11, S08, S09, S14: whatever the bytes of a file, N lines
    give N lines in their order; a blank one stays blank; a file and a pipe, and every layout, say
    the same; stdout holds nothing else; and each count of the summary is right."""
    path = folder / "in"
    path.write_bytes(data)
    options = ["--model", str(lively_run), "--device", "cpu", "--beam", str(beam)]
    options += ["--batch-size", str(size), "--max-length", str(longest)]
    options += ["--max-source-length", str(limit)]
    told = command(
        "translate", *options, "--input", str(path), "--format", "jsonl", "--nbest", str(beam)
    )
    assert told.status == 0
    raw = raw_lines(data)
    objects = [json.loads(row) for row in told.rows()]
    assert [item["line"] for item in objects] == list(range(1, len(raw) + 1))
    assert [item["source"].encode() for item in objects] == [
        line.decode(errors="replace").encode() for line in raw
    ]
    for item in objects:
        blank = not item["source"].strip()
        assert ("blank" in item["flags"]) is blank
        assert not blank or (item["text"] == "" and item["ids"] == [])
        assert len(item["ids"]) <= longest and "\n" not in item["text"]
    counts = expected(raw, objects, tokenizer, limit)
    assert counted(told.err) == counts

    extra = {"text": [], "scores": ["--scores"], "nbest": ["--nbest", str(beam)]}[layout]
    plain = command("translate", *options, *extra, stdin=data)
    assert plain.status == 0 and counted(plain.err) == counts
    if layout == "text" or (layout == "nbest" and beam == 1):
        assert plain.rows() == [item["text"] for item in objects]
        return
    rows = []
    for row in plain.rows():
        number, rest = row.split(" ||| ", 1)
        rows.append((int(number), *rest.rsplit(" ||| ", 2)))
    every = layout == "nbest"
    wanted = [
        (i, h["text"], f"{h['score']:.6f}", f"{h['ranked']:.6f}")
        for i, item in enumerate(objects)
        for h in (item.get("hypotheses", [item]) if every else [item])
    ]
    assert rows == wanted


def test_a_process_says_the_same(random_run: Path) -> None:
    """T01, T07: a real process, its pipes and its own stdin give what the functions give."""
    lines = [
        "the dog",
        "",
        "a\u2028b\x85c\rd",
        "</s> <pad>",
        "\ufeffx\x00y",
        "the small house " * 99,
    ]
    data = BOM + "\r\n".join(lines).encode() + b"\xe2\x82"
    arguments = ["translate", "--model", str(random_run), "--device", "cpu"]
    arguments += ["--beam", "3", "--nbest", "2", "--batch-size", "4", "--max-source-length", "40"]
    done = subprocess.run(
        [sys.executable, "-m", "mttrain", *arguments],
        input=data,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    inside = command(*arguments, stdin=data)
    assert done.returncode == inside.status == 0
    assert done.stdout == inside.out
    assert counted(done.stderr.decode()) == counted(inside.err)


def test_a_conversation(random_run: Path) -> None:
    """S18, T07, T08: with batch size 1 each line is answered before the next one is typed, also
    after a blank line, after bytes that are not UTF-8 and at a last line without its end."""
    questions = [
        b"the dog\n", b"\n", b"\xff bytes \xc3\r\n", "a\u2028b\x85\x0cc\n".encode(), b" \t\n",
        b"</s>\n", b"\x00\n", b"the small house " * 30 + b"\n", b"no end",
    ]  # fmt: skip
    for_us, from_them = os.pipe()
    for_them, from_us = os.pipe()
    answers: list[bytes] = []

    def talk() -> None:
        # An answer that does not come ends the talk, and with it the command.
        with open(from_us, "wb", buffering=0) as asking, open(for_us, "rb", buffering=0) as hearing:
            for question in questions:
                asking.write(question)
                if not question.endswith(b"\n"):
                    asking.close()
                if not select.select([hearing], [], [], 60)[0]:
                    return
                answers.append(hearing.readline())

    before = sys.stdin, sys.stdout, sys.stderr
    talker = threading.Thread(target=talk)
    with open(for_them, "rb") as read, open(from_them, "wb") as written:
        streams = io.TextIOWrapper(read), io.TextIOWrapper(written), io.TextIOWrapper(io.BytesIO())
        sys.stdin, sys.stdout, sys.stderr = streams
        talker.start()
        try:
            options = ["--batch-size", "1", "--max-source-length", "50"]
            status = main(["translate", "--model", str(random_run), *options])
            streams[1].flush()
        finally:
            sys.stdin, sys.stdout, sys.stderr = before
        talker.join()
    streams[2].seek(0)
    counts = counted(streams[2].read())
    assert status == 0
    assert len(answers) == len(questions) and all(answer.endswith(b"\n") for answer in answers)
    assert [n for n, answer in enumerate(answers) if answer == b"\n"] == [1, 4]
    assert (counts["lines"], counts["blank"]) == (9, 2)
    assert counts["replaced"] == (1, [3]) and counts["source_cut"] == (1, [8])


@pytest.mark.parametrize(
    "option",
    [
        "batch-size", "batch-tokens", "max-length", "min-length", "no-repeat-ngram", "nbest",
        "max-source-length", "seed", "top-k", "threads",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["-1", "0", "9" * 25], ids=["negative", "zero", "huge"])
def test_numbers_out_of_all_bounds(option: str, value: str, random_run: Path) -> None:
    """A number that no computer can count to ended in "unexpected" and an error of the library;
    it works, or it is refused with the option's name."""
    extra = ["--sample"] if option in ("seed", "top-k") else []
    arguments = ["--model", str(random_run), f"--{option}", value, *extra]
    # Without a limit an untrained model need not end.
    lines = b"\n \n\n" if option == "max-length" else b"the dog\n\na\n"
    done = command("translate", *arguments, stdin=lines)
    if done.status == 0:
        assert done.out.count(b"\n") == 3
    else:
        assert done.status == 2 and done.out == b""
        assert f"--{option}" in done.err and len(done.err.splitlines()) == 1


@cases(300)
@given(
    before=st.lists(st.integers(4, 6), max_size=4),
    block=st.lists(st.integers(4, 6), min_size=1, max_size=12),
    times=st.integers(1, 6),
    after=st.lists(st.integers(4, 6), max_size=6),
)
def test_loops(before: list[int], block: list[int], times: int, after: list[int]) -> None:
    """S01: a block of up to 10 tokens that comes four times in a row is a loop, of one token nine
    times, of two five times; nothing else is."""
    tokens = [*before, *block * times, *after]
    as_characters = "".join(chr(0x100 + token) for token in tokens)
    assert has_loop(tokens) is (LOOP.search(as_characters) is not None)


# ---- neighbours -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(lively_run: Path) -> Translator:
    return Translator(load_model(lively_run))


def assert_same_answers(found: Sequence[Translation], alone: Sequence[Translation]) -> None:
    """Equal texts, or hypotheses that tie."""
    for one, other in zip(found, alone, strict=True):
        assert one.source == other.source
        assert (one.blank, one.source_cut) == (other.blank, other.source_cut)
        close = pytest.approx(other.hypotheses[0].ranked, abs=1e-4)
        assert one.hypotheses[0].ranked == close
        tie = abs(one.hypotheses[0].ranked - other.hypotheses[0].ranked) > 0
        assert one.text == other.text or tie


@cases(60)
@given(lines=LINES, beam=BEAMS, size=SIZES, tokens=st.integers(1, 400), draw=st.booleans())
def test_a_line_does_not_depend_on_its_neighbours(
    engine: Translator, lines: list[str], beam: int, size: int, tokens: int, draw: bool
) -> None:
    """S07, D07: alone, in any batch, in a batch by tokens and in reverse order, each line has one
    answer and one score; so has each draw of sampling, which hangs on the line's number."""
    options: dict[str, Any] = {"max_length": 10, "min_length": 2, "no_repeat_ngram": 1}
    options |= {"max_source_length": 24}
    options |= {"sample": True, "top_k": 20} if draw else {"beam": beam}

    def answers(texts: Sequence[str], **batching: int) -> list[Translation]:
        return list(engine.translate_lines(texts, TranslateOptions(**options, **batching)))

    alone = answers(lines, batch_size=1)
    assert_same_answers(answers(lines, batch_size=size), alone)
    assert_same_answers(answers(lines, batch_tokens=tokens, window=5), alone)
    if not draw:
        assert_same_answers(answers(lines[::-1], batch_size=size)[::-1], alone)


@cases(60)
@given(lines=LINES, beam=BEAMS, size=SIZES, window=st.integers(1, 20), split=st.booleans())
def test_each_line_comes_back_as_it_was(
    tokenizer: Tokenizer, lines: list[str], beam: int, size: int, window: int, split: bool
) -> None:
    """T01, T15, T17, T20, K15, S08: a model that copies gives back every character of every line,
    up to the source limit; strings of special tokens, odd spaces and marks are text."""
    engine = copying(tokenizer, meta={"max_length": 30})
    limit = 50
    options = TranslateOptions(
        beam=beam, batch_size=size, window=window, max_source_length=limit, split_long=split
    )
    found = list(engine.translate_lines(lines, options))
    assert [t.line for t in found] == list(range(1, len(lines) + 1))
    for line, answer in zip(lines, found, strict=True):
        ids = tokenizer.encode(line)
        assert answer.source == line
        assert answer.text.count("\n") == answer.text.count("\r") == 0
        assert not tokenizer.newline_ids & set(answer.hypotheses[0].tokens)
        if not line.strip():
            assert answer.blank and answer.text == ""
            continue
        assert len(answer.hypotheses) == 1 and not answer.blank
        if split and len(ids) >= 30:
            continue  # the spaces between the parts are not those of the line
        assert answer.source_cut is (len(ids) >= limit)
        if "\r" not in line:  # nothing may end a line, not even a copy
            assert answer.text == tokenizer.decode(ids[: limit - 1])


# ---- learned positions ------------------------------------------------------------------------

POSITIONS = 12


@pytest.fixture(scope="module")
def short_sighted(tokenizer: Tokenizer) -> Translator:
    """An untrained model with a dozen learned positions."""
    config = ModelConfig(
        d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1,
        positions="learned", max_positions=POSITIONS,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Transformer(config, tokenizer.size, tokenizer.size)
    meta = {"source_lang": "en", "target_lang": "de", "max_length": POSITIONS}
    return Translator(ModelBundle(model.eval(), tokenizer, tokenizer, meta, Path("short")))


@cases(30)
@given(
    pairs=st.lists(st.tuples(TEXTS | BLANKS | GIANTS, TEXTS | BLANKS | GIANTS), max_size=8),
    beam=BEAMS,
    size=SIZES,
    longest=st.sampled_from([None, 3, 500]),
)
@example([("a", "x\ry\r"), ("\r", "</s>")], 1, 2, None)
def test_beyond_the_learned_positions(
    short_sighted: Translator,
    tokenizer: Tokenizer,
    pairs: list[tuple[str, str]],
    beam: int,
    size: int,
    longest: int | None,
) -> None:
    """M12, K12, S08: sources, forced prefixes and limits beyond the last position neither fail nor
    read a wrong row: the source is cut and marked, the output ends there, in one line."""
    lines, prefixes = [line for line, _ in pairs], [prefix for _, prefix in pairs]
    options = TranslateOptions(beam=beam, batch_size=size, max_length=longest)
    found = list(short_sighted.translate_lines(lines, options, prefixes))
    assert [t.source for t in found] == lines
    for (line, prefix), answer in zip(pairs, found, strict=True):
        tokens = answer.hypotheses[0].tokens
        if not line.strip():
            assert answer.blank and answer.text == ""
            continue
        assert answer.source_cut is (len(tokenizer.encode(line)) >= POSITIONS)
        assert len(tokens) + answer.hypotheses[0].finished <= POSITIONS
        assert "\n" not in answer.text and "\r" not in answer.text
        forced = tokenizer.encode(prefix.rstrip())[:POSITIONS]
        assert list(tokens[: len(forced)]) == forced
