"""The rules that filter, and a report whose figures are counted a second time by hand."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mttrain.check import check_corpus
from mttrain.config import CorpusConfig, DataConfig
from mttrain.corpus import read_pairs, write_lines
from mttrain.dataset import encode_corpus
from mttrain.errors import DataError
from mttrain.pairrules import REASONS, PairRules, blank_pairs, pair_hash
from mttrain.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Characters are tokens, so that lengths can be counted by eye."""
    return train_tokenizer(["abc"], vocab_size=260, level="character")


def corpus(directory: Path, name: str, pairs: Sequence[tuple[str, str]]) -> CorpusConfig:
    paths = directory / f"{name}.en", directory / f"{name}.de"
    for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
        write_lines(path, lines)
    return CorpusConfig(source=str(paths[0]), target=str(paths[1]), weight=1.0)


def config(train: list[CorpusConfig], valid: CorpusConfig, **settings: object) -> DataConfig:
    return DataConfig.model_validate(
        {"source_lang": "en", "target_lang": "de", "train": train, "valid": valid, **settings}
    )


# ---- rules ------------------------------------------------------------------------------------


def reasons(rules: PairRules, *lengths: tuple[int, int], blank: bool = False) -> list[str | None]:
    """Why pairs of these lengths are skipped."""
    one, two = (np.array(side) for side in zip(*lengths, strict=True))
    codes = rules.codes(one, two, np.full(len(one), blank), tagged=False)
    return [(None, *REASONS)[code] for code in codes]


def test_length_counts_the_end_of_sentence() -> None:
    """D01: the check measured words, or forgot EOS, and longer rows reached the model."""
    assert reasons(PairRules(10), (10, 10), (11, 2), (2, 11)) == [None, "too_long", "too_long"]


def test_blank_pairs_are_no_pairs() -> None:
    """T12: a model that sees empty targets learns to give empty output."""
    assert reasons(PairRules(10), (1, 5), (5, 1), (1, 1)) == ["blank"] * 3
    assert reasons(PairRules(10), (3, 3), blank=True) == ["blank"]
    pairs = [(" \u3000", "a"), ("a", "\t "), ("", "a"), ("a", ""), ("a", "b"), (" a", "\u200b")]
    assert blank_pairs(*zip(*pairs, strict=True)).tolist() == [True] * 4 + [False] * 2


def test_ratio_counts_subwords_without_the_end() -> None:
    """With EOS counted, pairs of one and three words pass a limit of two."""
    lengths = [(11, 21), (21, 11), (2, 4), (4, 2)]
    assert reasons(PairRules(100, max_ratio=2.0), *lengths) == [None, None, "ratio", "ratio"]
    assert reasons(PairRules(100), (2, 100)) == [None]


def test_duplicates_are_pairs_not_sides() -> None:
    """Two translations of one sentence are not a repetition, nor is a pair in two languages; and
    no border between the sides goes lost."""
    pairs = [
        ("a", "b", None),
        ("a", "c", None),
        ("a", "b", "2de"),
        ("ab", "", None),
        ("a", "b ", None),
    ]
    hashes = np.array([pair_hash(*pair) for pair in pairs], dtype=np.uint64)
    rules = PairRules(10, drop_duplicates=True)
    assert rules.new(hashes).all() and not rules.new(hashes[2:]).any()


# ---- report -----------------------------------------------------------------------------------


def test_counts_per_reason(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """T12, D01: most of a corpus was gone and nothing said so."""
    pairs = [(f"abc{n}", f"cba{n}") for n in range(20)]
    pairs[2] = ("", "a")
    pairs[4] = ("a", "")
    pairs[8] = ("", "")
    pairs[10] = ("a" * 10, "b" * 10)
    pairs[11] = ("a" * 9, "b" * 4)
    pairs[12] = pairs[13]
    valid = corpus(tmp_path, "valid", [("abc0", "x"), ("new", "y"), ("z" * 10, "z")])
    data = config(
        [corpus(tmp_path, "train", pairs)],
        valid,
        max_length=10,
        max_ratio=2.0,
        drop_duplicates=True,
    )
    report = check_corpus(data, (tokenizer, tokenizer))
    train, validation = report.splits
    assert train.skipped == {"blank": 3, "duplicate": 1, "ratio": 1, "too_long": 1}
    assert (train.pairs, train.kept, train.duplicates) == (20, 14, 1)
    assert validation.skipped == {"too_long": 1} and validation.overlap == 1
    text = report.text()
    assert "training: 14 of 20 pairs are used" in text
    assert "3 blank on one side or both" in text
    assert "1 too long (more than 10 subwords on a side)" in text
    assert "1 too unequal (one side more than 2.0 times the other)" in text
    assert "30 % of the training pairs are skipped" in text
    assert "1 of 3 validation source lines are also in the training corpus" in text


def test_everything_too_long_is_told_not_hidden(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """D01: a limit of 10 on sentences of 20 and more left nothing to train on."""
    pairs = [("a" * n, "b" * n) for n in range(20, 51)]
    one = corpus(tmp_path, "train", pairs)
    report = check_corpus(config([one], one, max_length=10), (tokenizer, tokenizer))
    assert report.splits[0].kept == 0
    assert "training: 0 of 31 pairs" in report.text()
    assert "100 % of the training pairs are skipped" in report.text()
    assert "51 all." in report.text()


def test_percentiles_by_hand(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """How to choose max_length: the figure for 99 % must keep 99 % of the pairs, EOS included."""
    lengths = list(range(1, 201))
    random.Random(1).shuffle(lengths)
    pairs = [("a" * n, "b" * (n // 2 + 1)) for n in lengths]
    one = corpus(tmp_path, "train", [*pairs, ("", "")])
    report = check_corpus(config([one], one), (tokenizer, tokenizer))
    found = report.splits[0].lengths
    assert found["source characters"] == [100, 180, 190, 198, 200]
    assert found["source subwords"] == [101, 181, 191, 199, 201]
    assert found["target characters"] == [51, 91, 96, 100, 101]
    assert found["longer side subwords"] == [101, 181, 191, 199, 201]
    assert "199 would keep 99 % of the training pairs, 201 all." in report.text()
    limited = check_corpus(config([one], one, max_length=199), (tokenizer, tokenizer)).splits[0]
    assert limited.kept == 198
    assert limited.lengths == found  # skipped pairs count: the limit is what is to be chosen


def test_characters_and_subwords_of_unicode(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Characters are Unicode characters; unknown ones cost their bytes."""
    one = corpus(tmp_path, "train", [("你好", "é")])
    report = check_corpus(config([one], one), (tokenizer, tokenizer))
    assert report.splits[0].lengths["source characters"][0] == 2
    assert report.splits[0].lengths["source subwords"][0] == 7
    assert report.splits[0].lengths["target subwords"][0] == 3


def test_copies_repetitions_and_overlap(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A test set inside the training corpus gives scores that mean nothing."""
    train = corpus(tmp_path, "train", [("a", "a"), ("b", "x"), ("b", "x"), ("b", "y"), ("", "")])
    second = corpus(tmp_path, "more", [("b", "x"), ("c", "z")])
    valid = corpus(tmp_path, "valid", [("b", "other"), ("b", "b"), ("new", "n")])
    test = corpus(tmp_path, "test", [("c", "z")])
    report = check_corpus(config([train, second], valid, test=test), (tokenizer, tokenizer))
    one, two, three = report.splits
    assert (one.pairs, one.duplicates, one.identical, one.overlap) == (7, 2, 1, 0)
    assert (two.overlap, two.identical, two.duplicates) == (2, 1, 0)
    assert (three.split, three.overlap) == ("test", 1)
    assert "14.3 % of the training pairs have the same text on both sides" in report.text()
    assert [len(split.files) for split in report.splits] == [2, 1, 1]


def test_report_is_json_with_warnings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The log holds the same figures as the screen."""
    train = corpus(tmp_path, "train", [("a", "b")])
    valid = corpus(tmp_path, "valid", [("c", "d")])
    report = check_corpus(config([train], valid), (tokenizer, tokenizer))
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["splits"][0]["kept"] == 1 and plain["warnings"] == report.warnings() == []
    assert plain["percentiles"] == [50, 90, 95, 99, 100]
    assert "warning" not in report.text()


def test_broken_corpora_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """T10, D16: files out of step, or empty, are found before any update."""
    good = corpus(tmp_path, "good", [("a", "b")] * 3)
    short = corpus(tmp_path, "short", [("a", "b")] * 3)
    write_lines(short.target, ["b"] * 2)
    for data in (config([short], good), config([good, short], good), config([good], short)):
        with pytest.raises(DataError, match=r"short\.en has 3 lines but .*short\.de has 2"):
            check_corpus(data, (tokenizer, tokenizer))
    empty = corpus(tmp_path, "empty", [("a", "b")])
    write_lines(empty.source, [])
    write_lines(empty.target, [])
    for data in (config([good, empty], good), config([good], empty)):
        with pytest.raises(DataError, match=r"empty\.en and .*empty\.de are empty"):
            check_corpus(data, (tokenizer, tokenizer))


def test_tens_of_thousands_of_pairs_in_seconds(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A check that takes longer than a short training run would be switched off."""
    pairs = [(f"source number {n}", f"Ziel Nummer {n}") for n in range(8000)]
    one = corpus(tmp_path, "train", pairs)
    Path(one.source).write_bytes(gzip.compress(Path(one.source).read_bytes(), 1))
    seen: list[int] = []
    start = time.process_time()
    report = check_corpus(config([one], one), (tokenizer, tokenizer), progress=seen.append)
    assert time.process_time() - start < 20
    assert seen == [4096, 8000] and report.splits[0].kept == 8000
    assert report.splits[1].overlap == 8000


class Asked(Tokenizer):
    """A tokenizer that keeps what it is asked for."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.texts: list[str] = []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same, noted."""
        self.texts.extend(texts)
        return super().encode_batch(texts)


@pytest.mark.parametrize("drop", [False, True])
def test_a_store_saves_the_tokenizer_and_changes_nothing(tmp_path: Path, drop: bool) -> None:
    """At a first start all text was tokenized twice. Lengths are those of the store, found by line
    numbers: behind skipped pairs, in a shard behind an empty one, and in JSON lines, which have
    gaps, they must not be those of another pair. Pairs that were skipped count all the same."""
    draw = random.Random(3)
    pairs = [("a" * draw.randint(0, 14), "b" * draw.randint(0, 14)) for _ in range(5000)]
    pairs[7], pairs[-1], pairs[4090:4100] = (" \u3000", "abc"), ("c" * 40, "c"), [("ab", "ab")] * 10
    corpus(tmp_path, "s-1", pairs)
    corpus(tmp_path, "s-3", pairs[50:90])
    for side in ("en", "de"):
        (tmp_path / f"s-2.{side}").touch()
    rows = [json.dumps({"en": source, "de": target}) for source, target in pairs[:300]]
    gaps = [line for n, row in enumerate(rows) for line in ([""] if n % 5 else ["", "", row])]
    write_lines(tmp_path / "j.jsonl", gaps)
    shards = CorpusConfig(source=f"{tmp_path}/s-*.en", target=f"{tmp_path}/s-*.de")
    tagged = CorpusConfig(pairs=f"{tmp_path}/j.jsonl", tag="bt")
    held_out = corpus(tmp_path, "v", pairs[:99])
    settings = {"max_length": 13, "max_ratio": 3.0, "drop_duplicates": drop, "test": held_out}
    data = config([shards, tagged, held_out], held_out, **settings)
    train_tokenizer(["abc"], vocab_size=264, level="character", tags=["bt"]).save(tmp_path / "t")
    plain, asked = Asked.load(tmp_path / "t"), Asked.load(tmp_path / "t")
    stores = [encode_corpus(data, (plain, plain), split, tmp_path) for split in ("train", "valid")]
    wanted = check_corpus(data, (plain, plain)).to_dict()
    seen: list[int] = []
    with_stores = {"stores": stores, "progress": seen.append}
    assert check_corpus(data, (asked, asked), **with_stores).to_dict() == wanted
    train, valid, _ = wanted["splits"]
    assert train["kept"] == len(stores[0]) and seen[-1] == train["pairs"]
    skipped = train["skipped"]
    assert skipped.keys() == {"blank", "too_long", "ratio"} | ({"duplicate"} if drop else set())
    again = sum(
        split["pairs"] - split["kept"] - split["skipped"]["blank"] for split in (train, valid)
    )
    tested = sum(not (source.isspace() or "" in (source, target)) for source, target in pairs[:99])
    assert len(asked.texts) == 2 * (again + tested)


def test_report_and_filter_agree(tmp_path: Path) -> None:
    """D01: what the report counts must be what training leaves out, rule by rule."""
    draw = random.Random(5)
    words = ["ab", "cde", "f", "g", "hij"]
    pairs = [
        (" ".join(draw.choices(words, k=draw.randint(0, 12))),) * 2
        if draw.random() < 0.1
        else tuple(" ".join(draw.choices(words, k=draw.randint(0, 12))) for _ in "st")
        for _ in range(400)
    ]
    one = corpus(tmp_path, "train", [(pair[0], pair[1]) for pair in pairs])
    learned = train_tokenizer([pair[0] for pair in pairs], vocab_size=280)
    settings = {"max_length": 11, "max_ratio": 1.5, "drop_duplicates": True}
    report = check_corpus(config([one], one, **settings), (learned, learned))
    counts: dict[str, int] = {}
    seen: set[tuple[str, str]] = set()
    for pair in read_pairs(one.source, one.target):
        lengths = len(learned.encode(pair.source)), len(learned.encode(pair.target))
        if min(lengths) == 0:
            reason = "blank"
        elif max(lengths) + 1 > 11:
            reason = "too_long"
        elif max(lengths) / min(lengths) > 1.5:
            reason = "ratio"
        elif (pair.source, pair.target) in seen:
            reason = "duplicate"
        else:
            seen.add((pair.source, pair.target))
            continue
        counts[reason] = counts.get(reason, 0) + 1
    assert len(counts) == 4 and report.splits[0].skipped == dict(sorted(counts.items()))
