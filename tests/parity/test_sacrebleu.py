"""Scores equal those of sacreBLEU's own command line."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mttrain.metrics import compare_systems, score_corpus

WORDS = ["the", "a", "man", "dog", "runs", "on", "house,", "tree.", "Red", "isn't", "3.14", "über"]


def corpus(seed: int, lines: int = 60) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 15))) for _ in range(lines)]


def noisy(lines: list[str], seed: int, share: float = 0.25) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(draw.choice(WORDS) if draw.random() < share else word for word in line.split())
        for line in lines
    ]


def sacrebleu(
    directory: Path, hyps: list[list[str]], refs: list[list[str]], *args: str
) -> subprocess.CompletedProcess[str]:
    """Run the command on these files, for all three metrics."""
    command = [sys.executable, "-m", "sacrebleu", "-m", "bleu", "chrf", "ter", "-w", "4", *args]
    for kind, files in (("ref", refs), ("hyp", hyps)):
        for number, lines in enumerate(files):
            path = directory / f"{kind}{number}"
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    command += ["-i", *(str(directory / f"hyp{number}") for number in range(len(hyps)))]
    command += ["--", *(str(directory / f"ref{number}") for number in range(len(refs)))]
    return subprocess.run(command, capture_output=True, check=True, encoding="utf-8")


def scores_of_command(
    directory: Path, hyps: list[str], refs: list[list[str]], *args: str
) -> list[dict[str, Any]]:
    scores: list[dict[str, Any]] = json.loads(
        sacrebleu(directory, [hyps], refs, "-f", "json", *args).stdout
    )
    return scores


@pytest.mark.parametrize(
    ("references", "options", "args"),
    [
        (1, {}, []),
        (3, {}, []),
        (2, {"lowercase": True}, ["-lc", "--chrf-lowercase"]),
        (1, {"tokenize": "char"}, ["-tok", "char"]),
        (1, {"bootstrap": 100}, ["--confidence", "--confidence-n", "100"]),
    ],
)
def test_scores_and_signatures_of_the_command(
    tmp_path: Path, references: int, options: dict[str, Any], args: list[str]
) -> None:
    """E04, E08: transposed or doubled references, other defaults: numbers nobody can compare."""
    base = corpus(1)
    refs = [noisy(base, seed, 0.1) for seed in range(references)]
    hyps = [*noisy(base, 9)[:-2], "", "A single. line"]
    expected = scores_of_command(tmp_path, hyps, refs, *args)
    scores = score_corpus(hyps, refs, **options)
    assert len(expected) == len(scores) == 3
    for theirs, ours in zip(expected, scores, strict=True):
        assert theirs["name"].startswith(ours.name)
        assert ours.value == pytest.approx(theirs["score"], abs=1e-4)
        assert ours.signature == theirs["signature"]
        if "bootstrap" in options:
            assert ours.ci == pytest.approx(
                (theirs["confidence_mean"], theirs["confidence_var"]), abs=1e-4
            )


def test_three_sentences_with_three_references(tmp_path: Path) -> None:
    """E04: where the table is square, transposed references raise no error and score 100."""
    base = corpus(2, lines=3)
    refs = [noisy(base, seed, 0.3) for seed in range(3)]
    hyps = noisy(base, 7, 0.3)
    expected = scores_of_command(tmp_path, hyps, refs)
    for theirs, ours in zip(expected, score_corpus(hyps, refs), strict=True):
        assert ours.value == pytest.approx(theirs["score"], abs=1e-4)


def test_chinese(tmp_path: Path) -> None:
    """E02: the tokenizer chosen by language is the one the command gives for zh."""
    refs, hyps = (
        ["我今天早上吃了两个苹果。", "他喜欢读书。"],
        ["我今天早上吃了一个苹果。", "他喜欢看书。"],
    )
    expected = scores_of_command(tmp_path, hyps, [refs], "-tok", "zh")
    (score,) = score_corpus(hyps, [refs], lang="zh", metrics=["bleu"])
    assert score.value == pytest.approx(expected[0]["score"], abs=1e-4)
    assert score.signature == expected[0]["signature"]


def test_paired_bootstrap_of_the_command(tmp_path: Path) -> None:
    """The significance printed for two systems is the one the command prints."""
    refs = corpus(3)
    one, two = noisy(refs, 1, 0.3), noisy(refs, 2, 0.28)
    # As text: sacreBLEU 2.6 cannot write this table as JSON under numpy 2.
    done = sacrebleu(
        tmp_path, [one, two], [refs], "-f", "text", "--paired-bs", "--paired-bs-n", "200"
    )
    numbers = [float(number) for number in re.findall(r"\d+\.\d{4}", done.stdout)]
    comparisons = compare_systems(one, two, [refs], samples=200)
    # Score, mean and half width of each metric; one row for each system, then the p-values.
    rows: list[list[float]] = [[], [], []]
    for ours in comparisons:
        rows[0] += [ours.baseline, *ours.baseline_ci]
        rows[1] += [ours.system, *ours.system_ci]
        rows[2] += [ours.p_value]
        assert ours.signature in done.stdout
    assert [*rows[0], *rows[1], *rows[2]] == pytest.approx(numbers, abs=1e-4)
