"""The settings of the text: mixing, tags and the languages of a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mttrain.config import RunConfig, parse_config
from mttrain.errors import ConfigError
from mttrain.pairs import parallel_text

A = {"source": "a.en", "target": "a.de"}
B = {"source": "b.en", "target": "b.fr", "target_lang": "fr"}


def config(train: Any, valid: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    texts = {"train": train, "valid": valid or {"source": "v.en", "target": "v.de"}}
    languages = {"source_lang": "en", "target_lang": "de"}
    return parse_config(
        {"run_dir": "r", "data": {**languages, **texts, **data}, "train": {"max_steps": 9}}
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "data.temperature: must be greater than 1, got 1; 1 leaves the corpora as they are"),
        (0.7, "got 0.7; an exponent of 0.7 is temperature: 1.43"),
        (0, "must be greater than 1, got 0"),
        ("5", 'wants a number, got "5"'),
    ],
)
def test_temperatures_that_are_none(value: object, message: str) -> None:
    """An exponent in place of a temperature would do the opposite of what is wanted."""
    with pytest.raises(ConfigError) as error:
        config([A, B], temperature=value)
    assert message in str(error.value)


def test_temperature_needs_several_corpora() -> None:
    """A setting without effect."""
    with pytest.raises(ConfigError, match="temperature: has no effect with one training corpus"):
        config([A], temperature=5)
    assert config([A, B], temperature=5).data.temperature == 5


def test_tags_and_languages_of_corpora() -> None:
    """Each corpus has its own languages and the tag of its own target; what is not said is what
    `data` says."""
    many = [
        {**A, "tag": True},
        {**B, "tag": True},
        {"source": "a.de", "target": "a.en", "source_lang": "de", "target_lang": "en", "tag": True},
        {**A, "tag": "bt"},
        {**B, "tag": "bt"},
    ]
    data = config(many, {**A, "tag": "bt"}, test={"pairs": "t.tmx", **B_LANG, "tag": True}).data
    assert [data.tag_of(corpus) for corpus in data.train] == ["2de", "2fr", "2en", "bt", "bt"]
    assert data.train_tags() == {"2de": "de", "2fr": "fr", "2en": "en", "bt": None}
    assert not data.untagged() and config([A, {**B, "tag": "x"}]).data.untagged()
    langs = [parallel_text(corpus, data).langs for corpus in data.train]
    assert langs == [("en", "de"), ("en", "fr"), ("de", "en"), ("en", "de"), ("en", "fr")]
    assert data.test is not None
    test = parallel_text(data.test, data)
    assert test.langs == ("en", "fr") and test.tag == "2fr"


B_LANG = {"target_lang": "fr"}


@pytest.mark.parametrize(
    ("train", "valid", "message"),
    [
        ([{**A, "tag": True}, {**B, "tag": True}], A, "data.valid.tag: is required.* 2de, 2fr"),
        ([{**A, "tag": True}, B], {**A, "tag": "2fr"}, "no training corpus has the tag 2fr.* 2de"),
        ([A], {**A, "tag": True}, "no training corpus has the tag 2de; they have none; remove it"),
        ([{**A, "tag": False}], A, r"tag: wants a name, or true"),
        ([{**A, "tag": 2024}], A, "tag: wants a name, or true"),
        ([{**A, "tag": "a b"}], A, "tag: a tag is up to 64 letters"),
        ([{**A, "tag": "pad"}], A, "<pad> is a special token"),
        ([{**A, "target_lang": "d e", "tag": True}], A, "the language 'd e' makes no tag"),
    ],
)
def test_tags_that_cannot_work(train: Any, valid: Any, message: str) -> None:
    """A model that always saw a tag is validated without one, or with one that it never saw."""
    with pytest.raises(ConfigError, match=message):
        config(train, valid)


def test_a_memory_of_translations_by_its_own_languages(tmp_path: Path) -> None:
    """The languages of the run were looked for in every TMX: a corpus of another direction gave
    only blank pairs."""
    unit = "".join(
        f'<tuv xml:lang="{lang}"><seg>{lang} text</seg></tuv>' for lang in ("en", "de", "fr")
    )
    path = tmp_path / "m.tmx"
    path.write_text(f'<tmx version="1.4"><header/><body><tu>{unit}</tu></body></tmx>')
    corpora = [
        {"pairs": str(path)},
        {"pairs": str(path), "source_lang": "fr", "target_lang": "en"},
    ]
    data = config(corpora).data
    texts = [next(parallel_text(corpus, data).pairs()) for corpus in data.train]
    assert [(text.source, text.target) for text in texts] == [
        ("en text", "de text"),
        ("fr text", "en text"),
    ]
