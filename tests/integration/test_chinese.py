"""English to Chinese from raw text: two vocabularies, no spaces, the zh tokenizer of BLEU."""

from __future__ import annotations

from pathlib import Path

from mttrain.runlog import read_log
from mttrain.trainer import train
from mttrain.translator import TranslateOptions, Translator
from tests.integration.training_help import tiny_config, write_pairs

PAIRS = [
    ("I love you", "我爱你"),
    ("You love me", "你爱我"),
    ("I love my mother", "我爱我的妈妈"),
    ("He drinks tea", "他喝茶"),
    ("I drink water", "我喝水"),
    ("You drink tea", "你喝茶"),
    ("She reads a book", "她看书"),
    ("I read a book", "我看书"),
    ("This is my book", "这是我的书"),
    ("I write code in Python 3", "我用Python 3写代码。"),
]


def test_i_love_you(tmp_path: Path) -> None:
    """K13, E02: no space comes into Chinese output, and validation is not scored as one word."""
    corpus = write_pairs(tmp_path, "train", PAIRS)
    config = tiny_config(
        tmp_path,
        {"train": corpus, "valid": corpus, "source_lang": "en", "target_lang": "zh"},
        tokenizer={"vocab_size": 300, "shared": False},
        model={"d_model": 64, "dropout": 0.0, "tie": "target"},
        optim={"lr": 5e-3, "warmup_steps": 20, "label_smoothing": 0.0},
        train={"max_steps": 200, "valid_every": 200, "batch_tokens": 1000, "log_every": 50},
    )
    run = train(config).run_dir
    sources, targets = zip(*PAIRS, strict=True)
    translator = Translator.load(run)
    assert translator.translate(sources, TranslateOptions(beam=3)) == list(targets)
    (record,) = [r for r in read_log(run / "log.jsonl") if r["kind"] == "valid"]
    assert record["bleu"] > 99 and "tok:zh" in record["signatures"][0]
