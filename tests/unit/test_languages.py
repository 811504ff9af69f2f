"""Language codes: which text has no spaces between sentences."""

from __future__ import annotations

import pytest

from mttrain.config import parse_config
from mttrain.errors import ConfigError
from mttrain.languages import (
    CHINESE,
    JAPANESE,
    KOREAN,
    base_code,
    same_language,
    sentence_space,
    suggested_code,
)
from mttrain.metrics import bleu_tokenizer


@pytest.mark.parametrize("lang", ["zh", "ZH-cn", "zho_Hans", "cmn", "yue", "ja", "jpn", "jpn_Jpan"])
def test_no_space_between_sentences(lang: str) -> None:
    """The parts of a long line were joined by the first letters of the code: cmn, yue and jpn got
    spaces into their text."""
    assert sentence_space(lang) == ""


@pytest.mark.parametrize("lang", ["jav", "jav_Latn", "zha", "ko", "de", "DE-at", "", None])
def test_space_between_sentences(lang: str | None) -> None:
    """Javanese (jav) and Zhuang (zha) were taken for Japanese and Chinese."""
    assert sentence_space(lang) == " "


def test_scoring_and_joining_use_one_table() -> None:
    for code in CHINESE | JAPANESE | KOREAN:
        assert bleu_tokenizer(f"{code.upper()}_Xxxx") != "13a"
    assert [base_code(name) for name in ("zh-CN", "jpn_Jpan", "De", None)] == [
        "zh",
        "jpn",
        "de",
        "",
    ]


@pytest.mark.parametrize(
    ("lang", "code"),
    [("Chinese", "zh"), ("cn", "zh"), ("jp", "ja"), ("kr", "ko"), ("german", "de"), ("CN-x", "zh")],
)
def test_wrong_names_of_languages_are_refused(lang: str, code: str) -> None:
    """`target_lang: cn` trained for hours and was then scored as if Chinese had spaces."""
    assert (suggested_code(lang) or "").split()[0] == code
    corpus = {"source": "a", "target": "b"}
    data = {"source_lang": "en", "target_lang": lang, "train": corpus, "valid": corpus}
    config = {"run_dir": "r", "data": data, "train": {"max_steps": 1}}
    with pytest.raises(ConfigError, match=f"data.target_lang: .*write {code}"):
        parse_config(config)
    parse_config(config | {"data": data | {"target_lang": "xx"}})  # private codes stay free


def test_codes_contradict_only_when_that_is_sure() -> None:
    """`--lang fr` for a model into German was believed; spellings of one language may differ."""
    for one, other in (("de", "de-AT"), ("de", "deu"), ("zh", "cmn_Hans"), ("zh", "cn")):
        assert same_language(one, other) and same_language(other, one)
    for one, other in (("fr", "de"), ("zh", "de"), ("zh", "jpn"), ("xx", "yy")):
        assert not same_language(one, other)
