"""The store under kills, in company, damaged, and of corpora in many files."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mttrain import corpus, encoding, store, storefiles, storewriter
from mttrain.config import CorpusConfig, DataConfig
from mttrain.dataset import TranslationDataset, encode_corpus
from mttrain.errors import DataError, WriteError
from mttrain.pairrules import PairRules
from mttrain.storefiles import are_whole, fingerprints, maker, map_array
from mttrain.storewriter import StoreWriter, store_writer
from mttrain.tokenizer import train_tokenizer
from tests.unit.store_help import LINES, PAIRS, both, child, opened, sentences, write

LIMIT = 120  # seconds for a child: a hang fails


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two text files, and its tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    train_tokenizer(LINES, vocab_size=350).save(folder / "tokenizer.json")
    write(folder, "all", sentences(PAIRS))
    return folder


def data_of(folder: Path, name: str, **rules: Any) -> DataConfig:
    corpus = CorpusConfig(source=str(folder / f"{name}.en"), target=str(folder / f"{name}.de"))
    rules = {"max_length": 60, "drop_duplicates": True, **rules}
    return DataConfig(source_lang="en", target_lang="de", train=[corpus], valid=corpus, **rules)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed encoding."""
    store = tmp_path_factory.mktemp("whole")
    opened(folder, store)
    return content(store)


# ---- kills ------------------------------------------------------------------------------------


def test_killed_encoding_goes_on_where_it_was(
    folder: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """An encoding of hours began from the start after each kill. Twice killed, the store must be
    the very one of an undisturbed encoding: skipped lines, repeated pairs and the numbers of words
    included."""
    for kill in (4096, 12_288):
        killed = subprocess.run(
            child(folder, tmp_path, kill), capture_output=True, text=True, timeout=LIMIT
        )
        assert killed.returncode == -9, killed.stderr
        assert not list(tmp_path.glob("train-*.json")) and list(tmp_path.glob("*.partial"))
    last = subprocess.run(
        child(folder, tmp_path), capture_output=True, text=True, timeout=LIMIT, check=True
    )
    said, *counts, end = last.stdout.splitlines()
    assert "after 12,288 pairs" in said and end == "made"
    assert [int(count) for count in counts] == [16_384, PAIRS]
    assert content(tmp_path) == whole


@pytest.fixture(scope="module")
def killed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a kill has left, to be copied."""
    store = tmp_path_factory.mktemp("killed") / "store"
    subprocess.run(child(folder, store, 8192), capture_output=True, timeout=LIMIT)
    return store


@pytest.mark.parametrize("damage", ["longer", "journal", "part", "gone", "key", "rest"])
def test_what_a_kill_left_is_looked_at(
    folder: Path, killed: Path, whole: dict[str, bytes], tmp_path: Path, damage: str
) -> None:
    """R08: what is behind the journal would be in the store twice; and a beginning of which
    something is gone is no beginning."""
    store = tmp_path / "store"
    shutil.copytree(killed, store)
    (partial,) = store.glob("*.partial")
    journal, part = partial / "journal.json", partial / "target.tokens"
    if damage == "longer":
        for path in partial.iterdir():
            if path != journal:
                path.write_bytes(path.read_bytes() + b"\1" * 100)
    elif damage == "journal":
        journal.write_text(journal.read_text()[:-9])
    elif damage == "part":
        part.write_bytes(part.read_bytes()[:100])
    elif damage == "gone":
        part.unlink()
    elif damage == "key":
        journal.write_text(journal.read_text().replace('"key": "', '"key": "0'))
    else:
        journal.write_text('{"key": 1}')
    seen: list[int] = []
    opened(folder, store, seen.append)
    assert seen[0] == (12_288 if damage == "longer" else 4096)
    assert content(store) == whole


def test_interrupt_keeps_what_was_done(
    folder: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Ctrl-C is the usual way to stop: it must not cost more than a kill."""

    class Terminated(BaseException):
        """What the command line makes of SIGTERM."""

    for kind, pairs in ((KeyboardInterrupt, 8192), (Terminated, 12_288)):

        def stop(done: int, kind: type[BaseException] = kind, pairs: int = pairs) -> None:
            if done == pairs:
                raise kind

        with pytest.raises(kind):
            opened(folder, tmp_path, stop)
    seen: list[int] = []
    assert not opened(folder, tmp_path, seen.append).reused and seen[0] == 16_384
    assert content(tmp_path) == whole


@pytest.mark.parametrize("call", [9, 12])
def test_interrupt_inside_a_block(
    folder: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
) -> None:
    """Ctrl-C or SIGTERM while the parts of a block were written: the journal then said that the
    block was there, and from it on each source stood beside the target of another pair."""
    plain, left = StoreWriter._append_offsets, itertools.count(-call)

    def interrupted(*arguments: Any) -> None:
        if next(left) == -1:
            raise KeyboardInterrupt
        plain(*arguments)

    monkeypatch.setattr(StoreWriter, "_append_offsets", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(folder, tmp_path)
    opened(folder, tmp_path)
    assert content(tmp_path) == whole


def test_full_disk_keeps_what_was_done(
    folder: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full when the journal was written, or still full at the next start, as
    torchrun makes one by itself, cost hours of encoding."""
    plain, left = corpus.atomic_write_bytes, itertools.count(-3)

    def full(path: Path, data: bytes) -> None:
        if path.parent.suffix == ".partial" and next(left) >= -1:
            raise WriteError(f"{path}: cannot write it: No space left on device.")
        plain(path, data)

    monkeypatch.setattr(storewriter, "COMMIT_EVERY", 0.0)
    monkeypatch.setattr(corpus, "atomic_write_bytes", full)
    for _ in range(2):
        with pytest.raises(WriteError):
            opened(folder, tmp_path)
    monkeypatch.undo()
    seen: list[int] = []
    opened(folder, tmp_path, seen.append)
    assert seen[0] > 4096 and content(tmp_path) == whole


def test_a_trusted_store_is_not_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 32 processes of a job read all of the text for its checksums, over one network."""
    opened(folder, tmp_path)
    monkeypatch.setattr(store, "are_whole", lambda *_: False)
    assert opened(folder, tmp_path, trusted=True).reused
    assert not opened(folder, tmp_path).reused


def test_changed_text_is_encoded_anew(folder: Path, tmp_path: Path) -> None:
    """Going on in a text that is another one now would mix the two."""
    write(tmp_path, "all", sentences(9000))
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    subprocess.run(child(tmp_path, tmp_path / "s", 4096), capture_output=True, timeout=LIMIT)
    write(tmp_path, "all", sentences(9001))
    seen: list[int] = []
    opened(tmp_path, tmp_path / "s", seen.append)
    assert seen[0] == 4096


def test_processes_make_the_same_store(
    folder: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many processes encode must not show in the store."""
    monkeypatch.setattr("mttrain.store.processes_for", lambda size: 2)
    opened(folder, tmp_path)
    assert content(tmp_path) == whole


# ---- company ----------------------------------------------------------------------------------


def test_two_starts_encode_once(folder: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Runs of a sweep that start together encoded the same text each, and replaced one another's
    files."""
    running = [
        subprocess.Popen(child(folder, tmp_path), stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ends = []
    for process in running:
        out, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0
        ends.append(out.split()[-1])
    assert sorted(ends) == ["made", "reused", "reused"]
    assert content(tmp_path) == whole


def test_whoever_waits_takes_over_from_the_dead(
    folder: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A lock that outlives its process would make all others wait for ever."""
    killed = subprocess.Popen(child(folder, tmp_path, 8192), stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None and killed.stdout.readline()  # it holds the lock
    store = opened(folder, tmp_path)
    killed.communicate(timeout=LIMIT)
    assert killed.returncode == -9 and not store.reused
    assert content(tmp_path) == whole


def test_only_one_makes_a_store(tmp_path: Path) -> None:
    """A lock on a file that its former holder has removed keeps nobody out."""
    inside, most, together = 0, 0, threading.Barrier(8)

    def make() -> None:
        nonlocal inside, most
        together.wait(timeout=LIMIT)
        with maker(tmp_path / "train-0.json") as folder:
            inside += 1
            most = max(most, inside)
            assert folder.is_dir()
            inside -= 1

    threads = [threading.Thread(target=make, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT)
        assert not thread.is_alive()
    assert most == 1 and not (tmp_path / "train-0.lock").exists()


def test_file_system_without_locks(
    folder: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some cluster file systems know no flock: that must not stop a start, nor leave a lock for
    whose sake every later start would look for what a kill has left."""

    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(storefiles.fcntl, "flock", refuse)
    opened(folder, tmp_path)
    assert content(tmp_path) == whole


def test_kill_at_the_very_end_leaves_nothing_for_ever(folder: Path, tmp_path: Path) -> None:
    """Between the index and the end, a kill left a lock and a folder that nobody removed."""
    opened(folder, tmp_path)
    before = content(tmp_path)
    (index,) = tmp_path.glob("*.json")
    index.with_suffix(".lock").touch()
    index.with_suffix(".partial").mkdir()
    assert opened(folder, tmp_path).reused and content(tmp_path) == before


def test_leftovers_are_swept_after_a_day(folder: Path, tmp_path: Path) -> None:
    """R08: each kill while encoding left a folder for ever; but one that is at work stays, and so
    does what this very store goes on with, however old. In a shared directory, what had "partial-"
    or ".tmp-" in its name was taken for ours."""
    ours = "0123456789abcdef.partial"
    old = [f"train-{ours}", f"test-{ours}-node1.site.org-12"]
    own = "test-fedcba9876543210.partial"
    kept = [f"valid-{ours}", own, "other.partial", "film.partial-2", ".tmp-of-mine"]
    for name in [*old, *kept]:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1, 1))
    rules = PairRules(9)
    with store_writer(tmp_path / kept[0], "key", rules, words=False) as writer:
        writer.commit()  # as every few seconds
        storefiles.sweep((tmp_path / own).with_suffix(".json"))
        assert {path.name for path in tmp_path.iterdir()} == set(kept)


# ---- damage -----------------------------------------------------------------------------------


def test_every_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R08: also in the last piece, at the borders of pieces, and where two files change places."""
    monkeypatch.setattr(storefiles, "_PIECE", 1000)
    generator = np.random.default_rng(0)
    paths = [tmp_path / name for name in "abc"]
    for path, size in zip(paths, (2500, 0, 1000), strict=True):
        path.write_bytes(generator.bytes(size))
    wanted = fingerprints(paths)
    assert [len(found) for found in wanted] == [4, 1, 2] and are_whole(paths, wanted)
    good = paths[0].read_bytes()
    for at in (0, 999, 1000, 1999, 2000, 2499):
        paths[0].write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        assert not are_whole(paths, wanted)
    for other in (good[:-1], good + b"x", good[1000:2000] + good[:1000] + good[2000:]):
        paths[0].write_bytes(other)
        assert not are_whole(paths, wanted)
    paths[0].write_bytes(good)
    assert are_whole(paths, wanted)


def test_empty_part_is_no_fault(tmp_path: Path) -> None:
    """An empty file cannot be mapped."""
    (tmp_path / "a").touch()
    assert map_array(tmp_path / "a", "int64").shape == (0,)


# ---- shards -----------------------------------------------------------------------------------


def test_shards_hold_what_one_file_holds(folder: Path, tmp_path: Path) -> None:
    """A corpus in parts must train like the whole; lines are told in their own files, and an empty
    shard is none."""
    lines = sentences(9000)
    for number, (first, end) in enumerate([(0, 5000), (5000, 5000), (5000, 5003), (5003, 9000)]):
        write(tmp_path, f"part-{number}", lines[first:end])
    write(tmp_path, "whole", lines)
    stores = [
        encode_corpus(data_of(tmp_path, name), both(folder), "train", tmp_path / "s")
        for name in ("part-*", "whole")
    ]
    parts, one = map(TranslationDataset, stores)
    for name in ("source.tokens", "source.offsets", "target.tokens", "target.offsets"):
        assert stores[0].part(name).read_bytes() == stores[1].part(name).read_bytes()
    assert stores[0].skipped == stores[1].skipped and len(parts) == len(one) > 5000
    assert [corpus["lines"] for corpus in stores[0].index["corpora"]] == [5000, 0, 3, 3997]
    for pair in (0, len(parts) // 2, len(parts) - 1):
        file, line = parts.locate(pair).split(", line ")
        offset = 5003 if file.endswith("part-3.en") else 0
        assert one.locate(pair) == f"{tmp_path}/whole.en, line {int(line) + offset}"
    assert file.endswith("part-3.en")
    assert stores[0].shards() == [[0, 1, 2, 3]] and parts.weights is None


def test_weights_and_temperature_take_shards_together(folder: Path, tmp_path: Path) -> None:
    """Mixed shard by shard, a corpus in many files would be shown far more often than in one."""
    write(tmp_path, "small", LINES[:30])
    for name, at in (("a-1", slice(0, 60)), ("a-2", slice(60, 140))):
        write(tmp_path, name, LINES[at])
    write(tmp_path, "large", LINES[:140])
    mixed = []
    for name in ("a-*", "large"):
        one, two = (data_of(tmp_path, wanted).train[0] for wanted in (name, "small"))
        train = [one.model_copy(update={"weight": 2.0}), two]
        data = data_of(tmp_path, "large").model_copy(update={"train": train, "temperature": 5.0})
        store = encode_corpus(data, both(folder), "train", tmp_path / "s")
        mixed.append((store, TranslationDataset(store)))
    (shards, parts), (whole, one) = mixed
    assert len(shards.weights) == 3 and shards.weights[0] == shards.weights[1]
    assert (shards.weights[0], shards.weights[2]) == whole.weights
    assert parts.weights is not None and one.weights is not None
    np.testing.assert_array_equal(parts.weights, one.weights)
    said = shards.mixture().replace("a-1.en and 1 more shards", "large.en")
    assert said == whole.mixture() != ""


def test_shard_without_partner(folder: Path, tmp_path: Path) -> None:
    """T10: told before anything is encoded."""
    write(tmp_path, "p-1", ["a"])
    write(tmp_path, "p-2", ["b"])
    (tmp_path / "p-2.de").unlink()
    with pytest.raises(DataError, match=r"p-2\.en has no partner"):
        encode_corpus(data_of(tmp_path, "p-*"), both(folder), "train", tmp_path / "s")


def test_modules_are_those_under_test() -> None:
    """The children above import by name: they must import what this process does."""
    code = "import mttrain.encoding; print(mttrain.encoding.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == encoding.__file__ and storewriter.COMMIT_EVERY > 1
