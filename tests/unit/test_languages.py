"""Language codes: which text has no spaces between sentences."""

from __future__ import annotations

import pytest

from mttrain.languages import CHINESE, JAPANESE, KOREAN, base_code, sentence_space
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
