"""A corpus for the tests of the store, and what child processes run on it; nothing here needs
torch, which takes seconds to load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mttrain.pairs import ParallelText
from mttrain.store import EncodedCorpus, open_store
from mttrain.tokenizer import Tokenizer

PAIRS = 20_000  # five blocks
LINES = [f"{a}{b} the {c}{b} of {a}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
RULES = {"max_length": 60, "max_ratio": None, "drop_duplicates": True}


def sentences(count: int) -> list[str]:
    """Some repeated, some blank, some too long."""
    lines = [f"{LINES[n * 7 % len(LINES)]} {n % 6000}" for n in range(count)]
    return ["" if n % 997 == 5 else line * (1 + 9 * (n % 501 == 3)) for n, line in enumerate(lines)]


def write(folder: Path, name: str, lines: list[str]) -> None:
    """The two text files of a corpus."""
    (folder / f"{name}.en").write_text("".join(f"{line}\n" for line in lines))
    (folder / f"{name}.de").write_text("".join(f"{line.upper()}\n" for line in lines))


def both(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    return tokenizer, tokenizer


def opened(
    folder: Path,
    directory: Path,
    progress: Callable[[int], None] | None = None,
    say: Callable[[str], None] | None = None,
    trusted: bool = False,
) -> EncodedCorpus:
    """The store in `directory` of the corpus "all" in `folder`, with all that a store can hold."""
    text = ParallelText((str(folder / "all.en"), str(folder / "all.de")), ("en", "de"))
    return open_store(
        [text], both(folder), "train", directory, rules=RULES, words=True, progress=progress,
        say=say, trusted=trusted,
    )  # fmt: skip


_CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import store_help
from mttrain import storewriter
storewriter.COMMIT_EVERY = 0.0
def progress(pairs):
    print(pairs, flush=True)
    if pairs >= {kill}:
        os.kill(os.getpid(), signal.SIGKILL)
say = lambda text: print(text, flush=True)
store = store_help.opened(Path({folder!r}), Path({store!r}), progress, say)
print("reused" if store.reused else "made")
"""


def child(folder: Path, store: Path, kill: int = 10**9) -> list[Any]:
    """A command that opens the store, and kills itself when so many pairs were read."""
    tests = str(Path(__file__).parent)
    code = _CHILD.format(tests=tests, folder=str(folder), store=str(store), kill=kill)
    return [sys.executable, "-c", code]
