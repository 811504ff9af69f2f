"""Blocks encoded in other processes against those encoded here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mttrain import cores, textblocks
from mttrain.encoding import (
    MOST,
    Arrays,
    BlockEncoder,
    EncoderLost,
    encoders,
    processes_for,
)
from mttrain.errors import DataError
from mttrain.pairrules import PairRules
from mttrain.pairs import ParallelText
from mttrain.textblocks import TextBlock, text_blocks
from mttrain.tokenizer import Tokenizer, train_tokenizer

LINES = [f"the {a} {b} runs over {a}{b}" for a in "bdfgk" for b in "aeiou"] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES, vocab_size=300, tags=["bt"])


@pytest.fixture
def text(files: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> ParallelText:
    """100 pairs in 10 blocks, some of which are refused."""
    monkeypatch.setattr(textblocks, "PAIRS", 10)
    monkeypatch.setattr(textblocks, "_STEP", 10)
    target = [line.upper() if n % 7 else "" for n, line in enumerate(LINES)]
    return ParallelText((files("a.en", LINES), files("a.de", target)), ("en", "de"))


def encoded(
    encoder: BlockEncoder, text: ParallelText, folder: Path, processes: int, tag: str | None = None
) -> list[Arrays]:
    with encoders(encoder, processes, folder) as encode:
        return list(encode((block, tag) for block in text_blocks(text)))


@pytest.mark.parametrize("words", [False, True])
def test_processes_give_the_same_blocks(
    tokenizer: Tokenizer, text: ParallelText, tmp_path: Path, words: bool
) -> None:
    """Results that come back in the order in which processes are ready would mix up the pairs."""
    encoder = BlockEncoder((tokenizer, tokenizer), PairRules(20, 3.0, True), words)
    here = encoded(encoder, text, tmp_path, 0, "bt")
    there = encoded(encoder, text, tmp_path, 2, "bt")
    assert len(here) == len(there) == 10
    for one, two in zip(here, there, strict=True):
        assert one.keys() == two.keys() and ("source.words" in one) == words
        for name in one:
            assert one[name].dtype == two[name].dtype
            np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("processes", [0, 2])
def test_first_fault_is_told(
    tokenizer: Tokenizer, files: Callable[..., str], text: ParallelText, tmp_path: Path,
    processes: int,
) -> None:  # fmt: skip
    """T07, T10: a file with two faults; the reader, which is ahead, met the later one first. The
    blocks before the fault come through."""
    content = "".join(f"{line}\n" for line in LINES).encode()
    broken = content.replace(LINES[35].encode(), b"\xff", 2).replace(b"\xff", b"x", 1)
    bad = ParallelText((files("b.en", broken), files("b.de", LINES[:-1])), ("en", "de"))
    encoder, seen = BlockEncoder((tokenizer, tokenizer), PairRules(20), False), []
    with (
        pytest.raises(DataError, match=r"b\.en, line 36, byte offset"),
        encoders(encoder, processes, tmp_path) as encode,
    ):
        for arrays in encode((block, None) for block in text_blocks(bad)):
            seen.append(arrays["lines"][0])
    assert seen == [1, 11, 21]


def test_killed_process_is_one_sentence(
    tokenizer: Tokenizer, text: ParallelText, tmp_path: Path
) -> None:
    """R08's kin: when the system ended an encoder for lack of memory, the start waited for ever."""
    encoder = BlockEncoder((tokenizer, tokenizer), PairRules(20), False)

    def tasks() -> Iterator[tuple[TextBlock, str | None]]:
        for number, block in enumerate(text_blocks(text)):
            if number == 4:
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
                for child in children.read_text().split():
                    command = Path(f"/proc/{child}/cmdline").read_bytes()
                    if b"mttrain.encoding" in command and str(tmp_path).encode() in command:
                        os.kill(int(child), signal.SIGKILL)
            yield block, None

    with (
        pytest.raises(EncoderLost, match=r"has ended \(status -9\)"),
        encoders(encoder, 2, tmp_path) as encode,
    ):
        list(encode(tasks()))


def test_encoders_load_little() -> None:
    """Each of a dozen processes with torch or pydantic in it would take half a gigabyte and
    seconds."""
    code = "import sys, mttrain.encoding; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_little_text_needs_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a container that may use one of 64 cores gets no dozen of them, in whose memory they do
    not fit."""
    assert processes_for(1000) == 0
    assert processes_for(1 << 40) <= max(len(os.sched_getaffinity(0)), 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for quota, count in ((None, MOST), (3.5, 3), (0.5, 0)):
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        assert processes_for(1 << 40) == count
