"""Byte-level BPE: lossless, closed to control ids, the same every time, and strict about files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mttrain.errors import ConfigError, DataError, TokenizerError
from mttrain.tokenizer import (
    BOS_ID,
    EOS_ID,
    MIN_VOCAB_SIZE,
    PAD_ID,
    SPECIAL,
    UNK_ID,
    Tokenizer,
    train_tokenizer,
)
from mttrain.tokenreport import tokenizer_report

TEXT = [
    "The cat sat on the mat, and the dog sat on the log.",
    "Die Katze saß auf der Matte; der Hund saß auf dem Baumstamm.",
    "the the the them then there",
    "Straßenbahnhaltestelle und Straßenbahn 2024",
] * 3
NASTY = [
    *("~_! ./", "don't", "3.14", "a\tb", "https://x.y/z?q=1", "l'été, c'est DON'T", ""),
    *(" lead", "trail ", "a  b", "a   b", "10\u00a0000\u202f€", "a\u3000b", " ", "      "),
    *("family: 👩\u200d👩\u200d👧 flag: 🇩🇪 skin: 👍🏽", "ක්\u200dය", "a\u200bb", "\u200ea", "❤️"),
    *("café", "cafe\u0301", "① ﬁ ︰", "हिन्दी में", "می\u200cخواهم", "ภาษาไทยไม่มีช่องว่าง"),
    *("the▁cat", "Ġ Ċ", "@@ x@@", "##x", "</w>", "<0xE4>", "<0x41>"),
    *("press </s> to stop", "[PAD] [PAD] x", "<unk>", "<s>", "<pad>", "<pad><pad>"),
    *("我用Python 3写代码。", "これはペンです。コーヒー", "龘", "☃ the cat 你", "A\u2028B\u0085C"),
    *("\x00", "a\x00b", "\x01\x7f", "\r", "a\rb", "x\n", "\r\n", " \n ", "\ufeffx", "\ufffd"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=330)


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return train_tokenizer([*TEXT, "你好", "你好"], vocab_size=400, level="character")


def chinese(size: int, between: str = "") -> list[str]:
    """Lines of `size` bytes in all: words of a Zipf distribution, as in real text."""
    draw = random.Random(1)
    letters = [chr(0x4E00 + n) for n in range(3000)]
    frequency = [1 / (n + 1) for n in range(3000)]
    words = [
        "".join(draw.choices(letters, frequency, k=draw.choice([1, 2, 2, 3]))) for _ in range(3000)
    ]
    lines: list[str] = []
    while size > 0:
        clauses = [
            between.join(draw.choices(words, frequency, k=6)) for _ in range(draw.choice([1, 2]))
        ]
        lines.append(f"，{between}".join(clauses) + "。")
        size -= len(lines[-1].encode())
    return lines


# ---- text to ids and back ---------------------------------------------------------------------


@pytest.mark.parametrize("text", NASTY)
def test_round_trip_of_nasty_lines(tokenizer: Tokenizer, characters: Tokenizer, text: str) -> None:
    """K01, K15, T15, T16, T20: spaces appeared or vanished, markers came back as spaces."""
    for each in (tokenizer, characters):
        ids = each.encode(text)
        assert each.decode(ids) == text
        assert min(ids, default=4) >= len(SPECIAL)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_round_trip_of_any_text(tokenizer: Tokenizer, characters: Tokenizer, text: str) -> None:
    """K01, K02: any Unicode text comes back, and no text yields a control id."""
    for each in (tokenizer, characters):
        ids = each.encode(text)
        assert each.decode(ids) == text
        assert min(ids, default=4) >= len(SPECIAL)
        assert b"".join(each._bytes[index] for index in ids) == text.encode()


def test_unknown_characters_are_bytes(tokenizer: Tokenizer) -> None:
    """K02: a character outside the training text disappeared from the ids."""
    ids = tokenizer.encode("☃")
    assert [tokenizer.token(index) for index in ids] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert UNK_ID not in tokenizer.encode("the ☃ cat 你 龘")


def test_batch_equals_single(tokenizer: Tokenizer) -> None:
    """The parallel path must not differ from the single one, nor lose the order."""
    assert tokenizer.encode_batch(NASTY) == [tokenizer.encode(text) for text in NASTY]
    assert tokenizer.encode_batch([]) == []


def test_special_ids_are_fixed_and_decode_to_nothing(tokenizer: Tokenizer) -> None:
    """K03: dropping special tokens left double spaces behind."""
    assert (PAD_ID, UNK_ID, BOS_ID, EOS_ID) == (0, 1, 2, 3)
    assert tuple(map(tokenizer.token, range(4))) == SPECIAL
    a, b = tokenizer.encode("the"), tokenizer.encode(" cat")
    assert tokenizer.decode([BOS_ID, *a, UNK_ID, *b, EOS_ID, PAD_ID, PAD_ID]) == "the cat"


def test_no_text_becomes_a_control_id_in_other_readers_either(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """T17: `encode_special_tokens` is not stored, so the file must hold no tokens to match."""
    tokenizer.save(tmp_path / "tokenizer.json")
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    for text in ("press </s> to stop", "<pad>", "<s><unk></s>"):
        assert plain.encode(text).ids == loaded.encode(text) == tokenizer.encode(text)
        assert min(loaded.encode(text)) >= 4
        assert plain.decode(plain.encode(text).ids) == text


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    """K11: output cut inside a multi-byte character crashed the decoder."""
    ids = tokenizer.encode("you 你")
    assert tokenizer.decode(ids[:-1]) == tokenizer.decode(ids[:-2]) == "you \ufffd"
    assert tokenizer.decode(ids[-2:]) == "\ufffd\ufffd"


def test_newline_ids_are_all_ids_with_line_ends(tokenizer: Tokenizer) -> None:
    """K12: a model that emits LF turns one translation into two lines."""
    assert tokenizer.newline_ids == {
        index for index in range(tokenizer.size) if set("\n\r") & set(tokenizer.decode([index]))
    }
    assert len(tokenizer.newline_ids) == 2


def test_pieces_are_readable_lossless_and_without_spaces(tokenizer: Tokenizer) -> None:
    """Two tokens that look alike, or a token with a space in it, cannot be typed back in."""
    seen = [tokenizer.token(index) for index in range(tokenizer.size)]
    assert len(set(seen)) == tokenizer.size
    assert not any(set(piece) & set(" \t\n\r\u00a0\u2028") or not piece for piece in seen)
    assert "▁the" in seen and "saß" in "".join(tokenizer.pieces("saß"))
    for text in NASTY:
        ids = [tokenizer.piece_id(piece) for piece in tokenizer.pieces(text)]
        assert ids == tokenizer.encode(text)
    assert tokenizer.piece_id("no such piece") is None


# ---- learning ---------------------------------------------------------------------------------


def test_ids_are_specials_then_bytes_then_merges(tokenizer: Tokenizer) -> None:
    """K04: the model takes its size from the tokenizer, so size must be the number of ids."""
    singles = [tokenizer.encode(chr(code)) for code in range(128)]
    assert all(len(ids) == 1 and 4 <= ids[0] < MIN_VOCAB_SIZE for ids in singles)
    assert tokenizer.size == 330
    used = {index for ids in tokenizer.encode_batch(TEXT) for index in ids}
    assert max(used) < tokenizer.size and max(used) >= MIN_VOCAB_SIZE


def test_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    """K04: asked for 20 entries, other tools give more: ids lie past the embedding's end."""
    with pytest.raises(ConfigError, match=r"vocab_size is 20.*at least 260"):
        train_tokenizer(TEXT, vocab_size=20)
    assert train_tokenizer(TEXT, vocab_size=260).size == 260


def test_chinese_with_few_entries_falls_back_to_bytes() -> None:
    """K04: more characters than entries; the size is kept and nothing is lost."""
    lines = chinese(30_000)
    small = train_tokenizer(lines, vocab_size=400)
    assert small.size == 400
    assert tokenizer_report(small, lines).failures == 0


def test_vocabulary_larger_than_the_text_can_give() -> None:
    """K05: 32000 entries from 10 lines: works, and tells the real size."""
    real = train_tokenizer(TEXT[:4], vocab_size=32_000)
    assert MIN_VOCAB_SIZE < real.size < 400


def test_no_text_is_an_error() -> None:
    """An empty file gave a tokenizer of bytes without a word."""
    for lines in ([], ["", "\n", "\r\n"]):
        with pytest.raises(DataError, match="no text to learn"):
            train_tokenizer(lines, vocab_size=300)


def test_errors_of_the_reader_come_through() -> None:
    """A bad byte in line 7 must reach the user as that, not as an error of the library."""

    def lines() -> Iterator[str]:
        yield from TEXT
        raise DataError("line 13")

    with pytest.raises(DataError, match="line 13"):
        train_tokenizer(lines(), vocab_size=300)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_are_not_learned(tokenizer: Tokenizer, end: str) -> None:
    """K09, T04: lines passed with their ends gave entries like "mat+LF" that never match."""
    other = train_tokenizer([line + end for line in TEXT], vocab_size=330)
    assert other.hash == tokenizer.hash
    inside = train_tokenizer(["mat\r\n\r\n  \r x\r y"] * 50, vocab_size=300)
    for index in range(MIN_VOCAB_SIZE, inside.size):
        assert not set("\r\n") & set(inside.decode([index]))
    assert inside.encode("mat\n")[:-1] == inside.encode("mat")


TIES = """
import sys
from mttrain.tokenizer import train_tokenizer
words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuväß"] * 2
lines = [" ".join(words[n : n + 7]) for n in range(0, len(words), 7)]
train_tokenizer(lines, vocab_size=600).save(sys.argv[1])
"""


def test_the_same_file_for_any_hash_seed_and_thread_count(tmp_path: Path) -> None:
    """K06: ties were broken by hash order: a model without its own tokenizer file was lost."""
    hashes = set()
    for seed, threads in (("0", "1"), ("1", "2"), ("2", "8")):
        path = tmp_path / f"{seed}.json"
        subprocess.run(
            [sys.executable, "-c", TIES, str(path)],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
        )
        hashes.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(hashes) == 1


def test_words_are_not_cut_at_marks_or_scripts(tokenizer: Tokenizer) -> None:
    """T15, K13: combining marks and joiners belong to their word, Han runs do not join Latin."""
    lines = ["हिन्दी में", "cafe\u0301", "ක්\u200dය", "我用Python写"] * 40
    learned = train_tokenizer(lines, vocab_size=400)
    whole = {learned.token(index) for index in range(learned.size)}
    assert {"हिन्दी", "▁में", "cafe\u0301", "我用", "Python", "写"} <= whole
    assert learned.pieces("Rindfleischetikettierung" + "x" * 30)[0].startswith("<0x") is False


def test_character_level_has_one_token_per_character(characters: Tokenizer) -> None:
    """A merge that joins two characters would not be character level."""
    text = "Straße 2024, 你好"
    assert characters.pieces(text) == list(text.replace(" ", "▁"))
    for index in range(4, characters.size):
        text = characters.decode([index])
        assert len(text) == 1 or set(text) == {"\ufffd"}  # or part of one


def test_long_unbroken_strings_take_no_time(tokenizer: Tokenizer) -> None:
    """T14: one word of 100,000 letters took minutes, to learn from and to encode."""
    blob = base64.b64encode(random.Random(1).randbytes(150_000)).decode()
    lines = ["a" * 100_000, blob, "word " * 10_000, "-" * 50_000, " " * 50_000]
    start = time.process_time()
    learned = train_tokenizer([*TEXT, *lines], vocab_size=1000)
    for each in (tokenizer, learned):
        for line in lines:
            assert each.decode(each.encode(line)) == line
    assert time.process_time() - start < 15


def test_chinese_is_learned_as_fast_as_spaced_text() -> None:
    """K13: without spaces each sentence is one word, and learning took hours."""
    lines = chinese(200_000)
    times = []
    for text in (chinese(200_000, between=" "), lines):
        start = time.process_time()
        learned = train_tokenizer(text, vocab_size=2000)
        times.append(time.process_time() - start)
    assert times[1] < 10 * times[0] + 1
    report = tokenizer_report(learned, lines)
    assert report.failures == 0 and report.tokens_per_character < 1
    assert " " not in learned.decode(learned.encode(lines[0]))


# ---- files ------------------------------------------------------------------------------------


def test_saved_and_loaded_is_the_same(
    tokenizer: Tokenizer, characters: Tokenizer, tmp_path: Path
) -> None:
    """K14, R17: ids and hash of a reloaded tokenizer are those of the run."""
    for each in (tokenizer, characters):
        path = tmp_path / "tokenizer.json"
        each.save(path)
        loaded = Tokenizer.load(path)
        assert loaded.hash == each.hash and loaded.size == each.size
        assert loaded.newline_ids == each.newline_ids
        assert loaded.encode_batch(NASTY) == each.encode_batch(NASTY)
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert tokenizer.hash != characters.hash
    assert tokenizer.hash != train_tokenizer(TEXT, vocab_size=329).hash


def test_file_reads_the_same_in_the_library(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """X05: the file is the exchange format: other programs must see the same ids and text."""
    tokenizer.save(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.get_vocab_size() == tokenizer.size
    for text in NASTY:
        ids = library.encode(text).ids
        assert ids == tokenizer.encode(text)
        assert library.decode(ids) == text


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edited(data: bytes) -> bytes:
        content = json.loads(data)
        change(content)
        return json.dumps(content).encode()

    return edited


def _swap_specials(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["<pad>"], vocab["<s>"] = vocab["<s>"], vocab["<pad>"]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: data[:1000], "no valid JSON"),
    "binary": (lambda data: b"\x80\x04pickle", "no valid JSON"),
    "nested": (lambda data: b"[" * 100_000, "no valid JSON"),
    "list": (lambda data: b"[1]", "not a tokenizer file"),
    "other json": (lambda data: b'{"model": 3}', "not a tokenizer file"),
    "kind": (_edit(lambda c: c["model"].update(type="Unigram")), "only byte-level BPE"),
    "no vocab": (_edit(lambda c: c["model"].pop("vocab")), "no vocabulary"),
    "vocab of text": (_edit(lambda c: c["model"]["vocab"].update(a="x")), "no vocabulary"),
    "swapped": (_edit(_swap_specials), r"<pad> has id 2; .* must have the ids 0, 1, 2, 3"),
    "missing": (_edit(lambda c: c["model"]["vocab"].pop("</s>")), "</s> is missing"),
    "gap": (_edit(lambda c: c["model"]["vocab"].update(the=9999)), "without a gap"),
    "byte": (_edit(lambda c: c["model"].update(vocab=dict.fromkeys(SPECIAL, 0))), "must have"),
    "merge": (_edit(lambda c: c["model"]["merges"].append(["q", "zz"])), "merge 71 does not fit"),
    "merges": (_edit(lambda c: c["model"].update(merges=[7])), "merge 1 does not fit"),
    "no merges": (_edit(lambda c: c["model"].pop("merges")), "no list of merges"),
    "normalizer": (_edit(lambda c: c.update(normalizer={"type": "NFKC"})), "sets 'normalizer'"),
    "prefix": (
        _edit(lambda c: c["model"].update(continuing_subword_prefix="##")),
        "sets 'continuing_subword_prefix'",
    ),
    "spaces": (_edit(lambda c: c.update(pre_tokenizer={"type": "Whitespace"})), "byte-level"),
    "none": (_edit(lambda c: c.update(pre_tokenizer=None)), "byte-level"),
    "regex": (
        _edit(lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="(")),
        "not a usable tokenizer",
    ),
    "removing": (
        _edit(lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed")),
        "'Split' is not supported",
    ),
    "prefix space": (
        _edit(lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
        "adds a space",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_unusable_files_are_refused_in_one_sentence(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    """K08, X06: a foreign or damaged file must not load with other ids, nor end in a panic."""
    change, message = BROKEN[name]
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    """The path is the first thing to tell."""
    with pytest.raises(TokenizerError, match="nowhere: cannot read the tokenizer: No such file"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="Is a directory"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_some_byte_is_refused(tmp_path: Path) -> None:
    """K02: without that byte, characters that hold it would vanish in silence."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXT, vocab_size=260).save(path)
    content = json.loads(path.read_bytes())
    del content["model"]["vocab"][max(content["model"]["vocab"], key=content["model"]["vocab"].get)]
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="1 of the 256 bytes"):
        Tokenizer.load(path)


def test_settings_that_change_ids_at_random_are_left_behind(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """K10, T17: the library stores dropout, truncation and special tokens, and obeys them."""
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    library = tokenizers.Tokenizer.from_file(str(path))
    library.model.dropout = 0.9
    library.enable_truncation(3)
    library.enable_padding(length=50)
    library.add_special_tokens(list(SPECIAL))
    library.save(str(path))
    loaded = Tokenizer.load(path)
    assert loaded.hash == tokenizer.hash
    assert loaded.encode_batch(NASTY) == tokenizer.encode_batch(NASTY)
    assert min(loaded.encode("x</s>y<pad>")) >= 4


def test_plain_byte_level_files_of_the_library_load(tmp_path: Path) -> None:
    """A GPT-2 style tokenizer with the right special ids is as good as ours."""
    library = tokenizers.ByteLevelBPETokenizer()
    library.train_from_iterator(TEXT, vocab_size=300, special_tokens=list(SPECIAL))
    library._tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode("The cat") == library.encode("The cat").ids


FORK = """
import os, sys
from mttrain.tokenizer import train_tokenizer
tokenizer = train_tokenizer(["the cat sat"] * 50, vocab_size=300)
expected = tokenizer.encode_batch(["the cat"] * 5000)
child = os.fork()
if child == 0:
    os._exit(tokenizer.encode_batch(["the cat"] * 5000) != expected)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("setting", [None, "false"])
def test_forked_workers_neither_hang_nor_warn(setting: str | None) -> None:
    """D15: threads used before a fork made the children hang, or print a warning each."""
    env = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    if setting:
        env["TOKENIZERS_PARALLELISM"] = setting
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=env, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ---- reporting --------------------------------------------------------------------------------


def test_report_counts_by_hand(characters: Tokenizer) -> None:
    """At character level the figures are arithmetic: tokens are characters."""
    report = tokenizer_report(characters, iter(["the cat", "", "Straße auf der Matte", "a"]))
    assert (report.lines, report.words, report.characters, report.tokens) == (4, 7, 28, 28)
    assert (report.longest_tokens, report.longest_line, report.failures) == (20, 3, 0)
    assert report.tokens_per_word == 4.0 and report.tokens_per_character == 1.0
    text = report.text()
    assert "4.000 tokens per word, 1.000 per character" in text
    assert "longest      20 tokens (line 3)" in text
    assert "longest      20 tokens (a.de, line 2)" in report.text("a.de, line 2")
    empty = tokenizer_report(characters, [])
    assert empty.tokens_per_word == 0 and empty.longest_line == 0
