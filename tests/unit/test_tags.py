"""Tags from their names to their ids: in vocabularies, in stores of encoded text, in a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mttrain.check import check_corpus
from mttrain.config import CorpusConfig, DataConfig
from mttrain.corpus import write_lines
from mttrain.dataset import TranslationDataset, encode_corpus
from mttrain.errors import CheckpointError, ConfigError, DataError, TokenizerError
from mttrain.tags import check_tag, name_problem, needed_tag, tag_lang
from mttrain.tokenizer import EOS_ID, Tokenizer, train_tokenizer

HERE = Path("here")
# Text that begs for a merge into the tags.
TEXT = [
    "<2de> a dog <bt>",
    "<2de><bt> two men",
    "2de bt <2 de> < bt >",
    "a<2de>dog",
    "<x-y_1>",
] * 40
TAGS = ["2de", "bt", "x-y_1"]


@pytest.fixture(scope="module", params=["subword", "character"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=330, level=request.param, tags=TAGS)


# ---- names and what a model knows -------------------------------------------------------------


@pytest.mark.parametrize("name", ["2de", "bt", "2zh_Hant", "2pt-BR", "A", "9", "x" * 64])
def test_names_of_tags(name: str) -> None:
    """Language codes as people write them make tags."""
    assert name_problem(name) is None


@pytest.mark.parametrize(
    "name", ["", "-", "_a", "-bt", "a b", "ä", "<bt>", "a>b", "bt\n", "x" * 65, "s", "pad", "unk"]
)
def test_what_is_no_name(name: str) -> None:
    """Signs alone could be merged from text; special tokens have names of the same form."""
    assert name_problem(name) is not None


def test_a_tag_that_training_did_not_see_is_refused() -> None:
    """An untrained entry of the vocabulary gives fluent nonsense; so does no tag, where there
    always was one."""
    alone = {"tags": {"2de": "de", "2fr": "fr"}, "untagged": False}
    both = {"tags": {"bt": "de"}, "untagged": True}
    for tag, meta in (("2de", alone), ("2fr", alone), ("bt", both), (None, both), (None, {})):
        check_tag(tag, meta, HERE)
    with pytest.raises(ConfigError, match=r"here was trained on text with tags alone.* 2de, 2fr"):
        check_tag(None, alone, HERE)
    with pytest.raises(ConfigError, match=r"tag 2es is unknown to here; .* 2de, 2fr"):
        check_tag("2es", alone, HERE)
    for meta in ({}, {"tags": {}, "untagged": True}):
        with pytest.raises(ConfigError, match=r"without tags.* remove it"):
            check_tag("2de", meta, HERE)
    assert (
        needed_tag(alone, HERE) == "2de" and needed_tag(both, HERE) is needed_tag({}, HERE) is None
    )


def test_the_language_of_an_output() -> None:
    """Parts of a split line were joined without spaces, in a language that has them."""
    meta = {"target_lang": "zh", "tags": {"2de": "de", "bt": None}}
    assert [tag_lang(tag, meta) for tag in (None, "2de", "bt")] == ["zh", "de", "zh"]
    assert tag_lang(None, {}) is None


@pytest.mark.parametrize(
    "meta", [{"tags": 3}, {"tags": ["a"]}, {"tags": {"a b": "de"}}, {"tags": {"a": 1}},
             {"tags": {"a": "de"}, "untagged": 1}],
)  # fmt: skip
def test_a_damaged_meta_is_told(meta: dict[str, Any]) -> None:
    """Somebody's meta.json must not end in a traceback."""
    with pytest.raises(CheckpointError, match=r"tags in meta.json are damaged"):
        check_tag(None, meta, HERE)


# ---- vocabularies -----------------------------------------------------------------------------


def test_tags_are_entries_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """They count in vocab_size, survive saving, and are no text when they come back."""
    assert tokenizer.tags == {"2de": 4, "bt": 5, "x-y_1": 6}
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.tags == tokenizer.tags and loaded.hash == tokenizer.hash
    assert [loaded.token(loaded.tags[tag]) for tag in TAGS] == ["<2de>", "<bt>", "<x-y_1>"]
    assert loaded.decode([4, *loaded.encode("a dog"), 5]) == "a dog"
    assert train_tokenizer(TEXT, vocab_size=263, tags=TAGS).size == 263
    with pytest.raises(ConfigError, match=r"3 tags and 256 bytes .* at least 263"):
        train_tokenizer(TEXT, vocab_size=262, tags=TAGS)
    assert train_tokenizer(TEXT, vocab_size=330).tags == {}


@given(st.lists(st.sampled_from(["<", "<2", "2de", "de", ">", "bt", " ", "x-y_1", "\n", "ä"])))
def test_no_text_yields_a_tag(tokenizer: Tokenizer, parts: list[str]) -> None:
    """S07 for tags: a source that holds a literal "<2fr>" would choose the language itself."""
    text = "".join(parts)
    ids = [*tokenizer.encode(text), *tokenizer.encode_batch([text])[0]]
    assert not set(ids) & set(tokenizer.tags.values())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_entry_that_a_merge_makes_is_no_tag(tmp_path: Path) -> None:
    """Vocabularies of other makers may merge across letters and signs: there "<bt>" is text, and a
    "</s>" that text can reach is refused."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["ab"] * 3, vocab_size=261, tags=["bt"]).save(path)
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\S+"}
    model = content["model"]
    assert Tokenizer.load(path).tags == {"bt": 4}
    parts = [("<", "b"), ("t", ">"), ("<b", "t>")]
    for pair in parts:
        model["vocab"].setdefault("".join(pair), len(model["vocab"]))
        model["merges"].append(list(pair))
    path.write_text(json.dumps(content))
    loaded = Tokenizer.load(path)
    assert loaded.tags == {} and loaded.decode(loaded.encode("<bt>")) == "<bt>"
    for pair in (("<", "/"), ("s", ">"), ("</", "s>")):
        model["vocab"].setdefault("".join(pair), len(model["vocab"]))
        model["merges"].append(list(pair))
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="lets text become </s>"):
        Tokenizer.load(path)


# ---- encoded text -----------------------------------------------------------------------------


def text_files(folder: Path, name: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    paths = {side: str(folder / f"{name}.{side}") for side in ("source", "target")}
    for path, lines in zip(paths.values(), zip(*pairs, strict=True), strict=True):
        write_lines(path, lines)
    return paths


def data_config(train: list[dict[str, Any]], **settings: Any) -> DataConfig:
    corpora = [CorpusConfig(**corpus) for corpus in train]
    valid = corpora[0].model_copy(update={"weight": 1.0})
    values = {"source_lang": "en", "target_lang": "de", "valid": valid, **settings}
    return DataConfig(train=corpora, **values)


PAIRS = [("a dog", "ein Hund"), ("two men", "zwei"), ("<bt> a", "b"), ("dog " * 6, "Hund")]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_each_corpus_has_its_tag(tmp_path: Path, dropout: float) -> None:
    """One id before the subwords of every pair of the corpus, on the source alone, never cut by
    BPE-dropout, in each epoch; and another tag makes another store."""
    tokenizer = train_tokenizer(TEXT, vocab_size=330, tags=TAGS)
    files = text_files(tmp_path, "a", PAIRS)
    train = [{**files, "tag": True}, files, {**files, "tag": "bt"}]
    pair = (tokenizer, tokenizer)
    words = dropout > 0
    store = encode_corpus(data_config(train), pair, "train", tmp_path, words=words)
    dataset = TranslationDataset(store, pair, dropout, seed=3)
    first = [[4], [], [5]]
    seen = set()
    for epoch in range(12):
        places = [(epoch, number) for number in range(len(dataset))]
        examples = dataset.__getitems__(places)
        lengths = dataset.lengths(epoch)
        for example in examples:
            source, target = PAIRS[example.number % 4]
            ids = example.source.tolist()
            assert len(ids) == lengths[0][example.number] and ids[-1] == EOS_ID
            tags = first[example.number // 4]
            assert ids[: len(tags)] == tags and not {4, 5, 6} & set(ids[len(tags) :])
            assert tokenizer.decode(ids[:-1]) == source
            assert tokenizer.decode(example.target[:-1].tolist()) == target
            assert not {4, 5, 6} & set(example.target.tolist())
            seen.add((example.number, tuple(ids)))
    assert (len(seen) > len(dataset)) == words
    assert [corpus.get("tag") for corpus in store.index["corpora"]] == ["2de", None, "bt"]
    other = data_config([files, files, {**files, "tag": "bt"}])
    assert not encode_corpus(other, pair, "train", tmp_path, words=words).reused
    assert encode_corpus(data_config(train), pair, "train", tmp_path, words=words).reused


def test_plain_ids_are_the_tokenizers(tmp_path: Path) -> None:
    """The tag is no text, and no space or mark goes with it."""
    tokenizer = train_tokenizer(TEXT, vocab_size=330, tags=TAGS)
    data = data_config([{**text_files(tmp_path, "a", PAIRS), "tag": "bt"}])
    for split in ("train", "valid"):
        dataset = TranslationDataset(encode_corpus(data, (tokenizer,) * 2, split, tmp_path))
        for number, (source, target) in enumerate(PAIRS):
            assert dataset[number].source.tolist() == [5, *tokenizer.encode(source), EOS_ID]
            assert dataset[number].target.tolist() == [*tokenizer.encode(target), EOS_ID]


def test_max_length_counts_the_tag(tmp_path: Path) -> None:
    """D01: rows one longer than the limit; counted alike by the check and by training."""
    characters = train_tokenizer(["abc"], vocab_size=264, level="character", tags=["bt"])
    files = text_files(tmp_path, "a", [("a" * n, "b") for n in range(1, 9)])
    for tag, kept in ((None, 5), ("bt", 4)):
        data = data_config([{**files, "tag": tag}], max_length=6)
        assert len(encode_corpus(data, (characters,) * 2, "train", tmp_path)) == kept
        train = check_corpus(data, (characters,) * 2).splits[0]
        assert train.kept == kept
        assert train.lengths["source subwords"][-1] == 9 + (tag is not None)


def test_blank_lines_stay_blank(tmp_path: Path) -> None:
    """T12 behind a tag: the tag alone must not make a blank source a sentence."""
    tokenizer = train_tokenizer(TEXT, vocab_size=330, tags=TAGS)
    files = text_files(tmp_path, "a", [("", "b"), (" ", "b")])
    with pytest.raises(DataError, match="2 blank"):
        encode_corpus(data_config([{**files, "tag": "bt"}]), (tokenizer,) * 2, "train", tmp_path)


def test_the_mixture_names_the_tags(tmp_path: Path) -> None:
    """Two directions of one file of pairs had the same name in the line that says how often."""
    tokenizer = train_tokenizer(TEXT, vocab_size=330, tags=TAGS)
    table = str(tmp_path / "a.tsv")
    write_lines(table, ["a dog\tein Hund", "two men\tzwei"])
    train = [{"pairs": table, "tag": "bt", "weight": 2.0}, {"pairs": table, "tag": True}]
    train.append({"pairs": table})
    store = encode_corpus(data_config(train), (tokenizer,) * 2, "train", tmp_path / "store")
    assert store.mixture() == (
        f"an epoch holds {table} <bt> 2 times (4 pairs), {table} <2de> 1 times (2 pairs), "
        f"{table} 1 times (2 pairs)"
    )


def test_corpora_by_temperature(tmp_path: Path) -> None:
    """The proportion is that of the pairs which are used, not of the lines in the files; times
    the weights; and the total is what the weights alone would give."""
    tokenizer = train_tokenizer(TEXT, vocab_size=330, tags=TAGS)
    small = text_files(tmp_path, "small", [("a", "b")] * 4 + [("", "b")] * 5)
    large = text_files(tmp_path, "large", [("a", "b")] * 64)
    train = [{**small, "weight": 3.0}, large]
    for temperature, ratio in ((None, 12 / 64), (2.0, 6 / 8), (3.0, 3 * 4 ** (1 / 3) / 4)):
        data = data_config(train, temperature=temperature)
        store = encode_corpus(data, (tokenizer,) * 2, "train", tmp_path / "store")
        weights = TranslationDataset(store).weights
        assert weights is not None and len(weights) == 68
        assert np.unique(weights[:4]).size == np.unique(weights[4:]).size == 1
        assert weights[:4].sum() / weights[4:].sum() == pytest.approx(ratio)
        assert weights.sum() == pytest.approx(3 * 4 + 64)
        assert [c["times"] for c in store.report()["corpora"]] == [weights[0], weights[4]]
        assert f"small.source {weights[0]:.4g} times" in store.mixture()
    plain = encode_corpus(
        data_config([small, large]), (tokenizer,) * 2, "train", tmp_path / "store"
    )
    assert plain.mixture() == "" and "times" not in plain.report()["corpora"][0]
