"""The common text: one segmentation for all programs, so that they work on the same tokens.

A byte-level BPE is learned jointly from both sides of the training text. Every program but ours
reads files in which subword 123 is the word `t123`, with a dictionary of all these words; ours
reads the text itself and the vocabulary, and so has the same subwords.

Pairs with a blank side, or with more than 250 subwords on one, are left out beforehand: every
program would treat them in its own way.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench_setup import BenchError, Setup, answer, say

from mttrain.corpus import read_pairs
from mttrain.tokenizer import SPECIAL, Tokenizer, train_tokenizer

SIDES = ("src", "tgt")
PARTS = {
    "train": ("train",),
    "valid": ("valid", "val", "dev"),
    "test": ("test", "test_2016_flickr"),
}
VALID_PAIRS = 20  # of validation: no program is measured on it
LONGEST = 250


def corpus_files(folder: Path, part: str, languages: tuple[str, str]) -> tuple[Path, Path]:
    """The source and target file of train, valid or test text in a folder."""
    for name in PARTS[part]:
        files = [folder / f"{name}.{language}" for language in languages]
        if all(file.exists() for file in files):
            return files[0], files[1]
    wanted = " or ".join(f"{name}.{languages[0]}/.{languages[1]}" for name in PARTS[part])
    raise BenchError(f"{folder} has no {wanted}; name another folder with --corpus")


def prepare(setup: Setup, corpus: Path) -> dict[str, Any]:
    """Write the common text into the work directory, unless it is there; returns what is in it."""
    record = Path(setup.text("text.json"))
    wanted = {
        "corpus": str(corpus.resolve()),
        "languages": list(setup.languages),
        "vocab": setup.vocab,
        "sentences": setup.sentences,
    }
    if record.exists():
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if all(found.get(key) == value for key, value in wanted.items()):
            return found
        raise BenchError(
            f"{setup.work} holds the text of another corpus or vocabulary; use another --work"
        )
    setup.folder("text")
    pairs = {
        part: [
            (pair.source, pair.target)
            for pair in read_pairs(*map(str, corpus_files(corpus, part, setup.languages)))
        ]
        for part in PARTS
    }
    tokenizer = train_tokenizer(
        (line for pair in pairs["train"] for line in pair), vocab_size=setup.vocab
    )
    tokenizer.save(setup.text("tokenizer.json"))
    counts = {part: _write(setup, part, pairs[part], tokenizer) for part in PARTS}
    _write_dictionaries(setup, tokenizer.size)
    found = {**wanted, "types": tokenizer.size, "parts": counts}
    record.write_text(json.dumps(found, indent=1), encoding="utf-8")
    say(f"common text: {counts['train']}, {tokenizer.size} types, in {setup.text('')}")
    return found


def _write(
    setup: Setup, part: str, pairs: list[tuple[str, str]], tokenizer: Tokenizer
) -> dict[str, int]:
    """The text and the tokens of one part; returns counts, with EOS in those of tokens."""
    most = {"valid": VALID_PAIRS, "test": setup.sentences}.get(part, len(pairs))
    encoded = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1)]
    kept = [
        (pair, ids)
        for pair, *ids in zip(pairs, *encoded, strict=True)
        if all(text.strip() for text in pair) and max(map(len, ids)) <= LONGEST
    ][:most]
    for side, name in enumerate(SIDES):
        texts = [pair[side] for pair, _ in kept]
        tokens = [" ".join(f"t{i}" for i in ids[side]) for _, ids in kept]
        for file, lines in ((f"{part}.{name}", texts), (f"{part}.tok.{name}", tokens)):
            text = "".join(f"{line}\n" for line in lines)
            Path(setup.text(file)).write_text(text, encoding="utf-8", newline="\n")
    sums = [sum(len(ids[side]) + 1 for _, ids in kept) for side in (0, 1)]
    return {"pairs": len(kept), "source_tokens": sums[0], "target_tokens": sums[1]}


def _write_dictionaries(setup: Setup, size: int) -> None:
    """The words of all subwords, in each program's format; each adds its own four or two signs."""
    words = [f"t{number}" for number in range(len(SPECIAL), size)]
    marian = ["</s>", "<unk>", *words]
    joey = ["<unk>", "<pad>", "<s>", "</s>", *words]
    for name, lines in (
        ("dict.fairseq.txt", [f"{word} 1" for word in words]),
        ("dict.onmt.txt", words),
        ("dict.joeynmt.txt", joey),
        ("dict.marian.yml", [f'"{word}": {number}' for number, word in enumerate(marian)]),
    ):
        Path(setup.text(name)).write_text("".join(f"{x}\n" for x in lines), encoding="utf-8")


def common_text(setup: Setup, *, corpus: str) -> dict[str, Any]:
    """Write the common text."""
    return prepare(setup, Path(corpus))


def tokenizer(setup: Setup) -> dict[str, Any]:
    """Seconds to learn the vocabulary; megabytes of text encoded and decoded per second."""
    lines = [
        line
        for side in ("src", "tgt")
        for line in Path(setup.text(f"train.{side}")).read_text(encoding="utf-8").split("\n")[:-1]
    ]
    size = sum(len(line.encode()) + 1 for line in lines) / 1e6
    start = time.perf_counter()
    learned = train_tokenizer(lines, vocab_size=setup.vocab)
    found = {"learn_seconds": time.perf_counter() - start, "megabytes": size}
    encoded = learned.encode_batch(lines)
    for what, call in (
        ("encode", lambda: learned.encode_batch(lines)),
        ("decode", lambda: [learned.decode(ids) for ids in encoded]),
    ):
        passes, start = 0, time.perf_counter()
        while passes == 0 or time.perf_counter() - start < min(setup.seconds, 5.0):
            call()
            passes += 1
        found[f"{what}_mb_per_second"] = size * passes / (time.perf_counter() - start)
    return found


if __name__ == "__main__":
    sys.exit(answer((common_text, tokenizer)))
