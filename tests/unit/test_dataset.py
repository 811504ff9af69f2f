"""Encoded pairs and their batches, held against the tokenizer and against the text files."""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
from collections import Counter
from multiprocessing import resource_sharer
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mttrain.batching import EpochPlan, TokenBatchSampler, plan_epoch
from mttrain.config import CorpusConfig, DataConfig
from mttrain.dataset import (
    Batch,
    Example,
    TranslationDataset,
    batch_loader,
    collate,
    empty_batch,
    encode_corpus,
    load_raw,
)
from mttrain.errors import DataError
from mttrain.store import EncodedCorpus
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer, train_tokenizer

TEXT = "a dog runs over the green grass and two men watch it from an old red car"
WORDS = TEXT.split()


def sentence(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + k) % len(WORDS)] for k in range(length))


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    lines = [sentence(n, 12) for n in range(40)]
    source = train_tokenizer(lines, vocab_size=400)
    return source, train_tokenizer([line.upper() for line in lines], vocab_size=300)


def write(folder: Path, name: str, lines: list[str]) -> str:
    path = folder / name
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return str(path)


def corpus(
    folder: Path, name: str, sources: list[str], targets: list[str], weight: float = 1.0
) -> CorpusConfig:
    return CorpusConfig(
        source=write(folder, f"{name}.en", sources),
        target=write(folder, f"{name}.de", targets),
        weight=weight,
    )


def data_config(train: list[CorpusConfig], **rules: Any) -> DataConfig:
    return DataConfig(source_lang="en", target_lang="de", train=train, valid=train[0], **rules)


def simple(folder: Path, lengths: list[int], **rules: Any) -> DataConfig:
    """A corpus whose pair n has lengths[n] words on both sides."""
    sources = [sentence(n, length) for n, length in enumerate(lengths)]
    targets = [source.upper() for source in sources]
    return data_config([corpus(folder, "train", sources, targets)], **rules)


def encoded(
    data: DataConfig, tokenizers: tuple[Tokenizer, Tokenizer], directory: Path
) -> TranslationDataset:
    return TranslationDataset(encode_corpus(data, tokenizers, "train", directory))


# ---- the store --------------------------------------------------------------------------------


def test_pairs_are_the_tokenizers_ids_with_eos(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """S22, D02: ids without the end symbol, or cut before it, teach the model never to stop. More
    pairs than one block, so that offsets run on over its edge."""
    data = simple(tmp_path, [1 + n % 9 for n in range(4200)])
    dataset = encoded(data, tokenizers, tmp_path / "store")
    sources, targets = load_raw(data.train[0], data)
    assert len(dataset) == 4200
    for n in [0, 1, 4095, 4096, 4199]:
        example = dataset[n]
        assert example.source.tolist() == [*tokenizers[0].encode(sources[n]), EOS_ID]
        assert example.target.tolist() == [*tokenizers[1].encode(targets[n]), EOS_ID]
        assert example.number == n
    assert dataset.source_lengths.tolist() == [len(dataset[n].source) for n in range(4200)]
    assert dataset.target_lengths.tolist() == [len(dataset[n].target) for n in range(4200)]
    assert dataset.pair_numbers.tolist() == list(range(1, 4201))
    assert dataset.source_lengths.dtype == dataset.target_lengths.dtype == np.int32


def numbers_tokenizer(folder: Path, size: int) -> Tokenizer:
    """One token for each decimal number up to about `size`, by merges of a digit at a time."""
    train_tokenizer(["x"], vocab_size=260).save(folder / "bytes.json")
    content = json.loads((folder / "bytes.json").read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for number in range(10, size):
        vocab[str(number)] = len(vocab)
        merges.append([str(number)[:-1], str(number)[-1]])
    (folder / "numbers.json").write_text(json.dumps(content))
    return Tokenizer.load(folder / "numbers.json")


def test_large_vocabulary_is_not_cut_to_16_bits(tmp_path: Path) -> None:
    """S23's kin: ids above 65,535 stored in 2 bytes come back as other ids."""
    small, large = numbers_tokenizer(tmp_path, 100), numbers_tokenizer(tmp_path, 70_000)
    assert large.encode("69000")[0] > 1 << 16 > small.size
    data = data_config([corpus(tmp_path, "t", ["69000", "69700"], ["69000", "x"])])
    dataset = encoded(data, (large, small), tmp_path / "store")
    assert dataset[0].source.tolist() == [*large.encode("69000"), EOS_ID]
    assert dataset[1].source.tolist() == [*large.encode("69700"), EOS_ID]
    assert dataset[0].source.dtype == np.uint32 and dataset[0].target.dtype == np.uint16


def test_blank_pairs_are_skipped_as_pairs(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """T12: a blank line stopped training, or shifted one side, or taught silence."""
    sources = [sentence(n, 5) for n in range(20)]
    targets = [source.upper() for source in sources]
    sources[2] = targets[4] = sources[8] = targets[8] = ""
    data = data_config([corpus(tmp_path, "train", sources, targets)])
    dataset = encoded(data, tokenizers, tmp_path / "store")
    assert dataset.store.skipped == {"blank": 3}
    assert dataset.store.index["skipped"]["blank"]["first"] == [[0, 3], [0, 5], [0, 9]]
    assert "17 of 20 pairs" in dataset.store.text()
    assert "skipped 3 blank (lines 3, 5, 9)" in dataset.store.text()
    assert dataset.pair_numbers.tolist() == [n for n in range(1, 21) if n not in (3, 5, 9)]
    for n, line in enumerate(dataset.pair_numbers):
        assert tokenizers[0].decode(dataset[n].source.tolist()) == sources[line - 1]
        assert tokenizers[1].decode(dataset[n].target.tolist()) == targets[line - 1]
    assert collate([dataset[n] for n in range(17)]).source.shape[0] == 17


def test_long_pairs_are_counted_in_subwords_with_eos(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """D01, D03: the filter measured words (long sentences came through and crashed later), or most
    of the corpus was gone and nothing said so, or over-long targets were cropped."""
    data = simple(tmp_path, list(range(1, 31)), max_length=10)
    dataset = encoded(data, tokenizers, tmp_path / "store")
    sources, targets = load_raw(data.train[0], data)
    fits = [
        n
        for n in range(30)
        if len(tokenizers[0].encode(sources[n])) + 1 <= 10
        and len(tokenizers[1].encode(targets[n])) + 1 <= 10
    ]
    assert 0 < len(fits) < 30
    assert dataset.pair_numbers.tolist() == [n + 1 for n in fits]
    assert max(dataset.source_lengths.max(), dataset.target_lengths.max()) == 10
    assert dataset.store.report()["skipped"]["too_long"]["count"] == 30 - len(fits)
    for n in range(len(dataset)):
        assert tokenizers[1].decode(dataset[n].target.tolist()) == targets[fits[n]]


def test_no_pair_left_is_an_error_that_tells_why(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """D01: with all pairs too long, training began and divided by zero."""
    data = simple(tmp_path, [30] * 7, max_length=5)
    with pytest.raises(DataError, match=r"train\.en .*7 too long \(lines 1, 2, 3, 4, 5\)") as e:
        encoded(data, tokenizers, tmp_path / "store")
    assert "max_length is 5" in str(e.value) and "\n" not in str(e.value)
    assert not list((tmp_path / "store").iterdir())


def test_empty_validation_is_refused(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """D16: an empty or fully filtered validation set was a division by zero hours later."""
    train = corpus(tmp_path, "train", ["a dog"] * 3, ["A DOG"] * 3)
    for name, lines in (("zero", []), ("long", [sentence(1, 40)] * 2), ("blank", ["", " "])):
        valid = corpus(tmp_path, name, lines, lines)
        data = DataConfig(
            source_lang="en", target_lang="de", train=[train], valid=valid, max_length=8
        )
        with pytest.raises(DataError, match="No validation pair"):
            encode_corpus(data, tokenizers, "valid", tmp_path / "store")
    with pytest.raises(DataError, match="empty"):
        load_raw(corpus(tmp_path, "zero", [], []), simple(tmp_path, [1]))


def test_validation_keeps_all_lines_for_bleu(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """D06: validation left out pairs by the rules made for training, so its BLEU was that of an
    easier set."""
    sources = [sentence(n, 4) for n in range(6)] + [sentence(0, 40), "", sentence(0, 4)]
    targets = [*sources[:5], "a", *sources[6:]]
    valid = corpus(tmp_path, "valid", sources, targets)
    data = DataConfig(
        source_lang="en",
        target_lang="de",
        train=[valid],
        valid=valid,
        test=valid,
        max_length=30,
        max_ratio=2.0,
        drop_duplicates=True,
    )
    assert load_raw(valid, data) == (sources, targets)
    tokenizers = (tokenizers[0], tokenizers[0])
    store = encode_corpus(data, tokenizers, "valid", tmp_path / "store")
    assert store.skipped == {"too_long": 1, "blank": 1} and len(store) == 7
    assert len(encode_corpus(data, tokenizers, "test", tmp_path / "store")) == 7
    train = encode_corpus(data, tokenizers, "train", tmp_path / "store")
    assert train.skipped == {"ratio": 1, "duplicate": 1, "too_long": 1, "blank": 1}


def test_unequal_files_leave_nothing_behind(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """T10, R09: files out of step were trained on to the end of the shorter; the half-made store
    of a failed start was taken for a whole one by the next."""
    sources = [sentence(n, 4) for n in range(5000)]
    data = data_config([corpus(tmp_path, "t", sources, sources[:-1])])
    with pytest.raises(DataError, match=r"5000.*4999"):
        encoded(data, tokenizers, tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())


def test_second_start_maps_the_store(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """Contract 3: encoding again at each start costs minutes; worse is a store that is taken over
    though the text, the rules or the tokenizer are others now."""
    data = simple(tmp_path, [3, 4, 5])
    store = tmp_path / "store"
    first = encode_corpus(data, tokenizers, "train", store)
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    again = encode_corpus(data, tokenizers, "train", store)
    assert not first.reused and again.reused and first.index == again.index
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == before
    other_rules = data.model_copy(update={"max_length": 7})
    assert not encode_corpus(other_rules, tokenizers, "train", store).reused
    assert not encode_corpus(data, (tokenizers[1], tokenizers[1]), "train", store).reused
    source = Path(data.train[0].source)
    text = source.read_text().replace("a dog", "a car", 1)
    source.write_text(text)
    os.utime(source, ns=(1, 1))
    changed = encode_corpus(data, tokenizers, "train", store)
    assert not changed.reused
    assert changed.index["corpora"][0]["sha256"] != first.index["corpora"][0]["sha256"]
    assert not encode_corpus(data, tokenizers, "valid", store).reused


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "count", "index", "deep"])
def test_damaged_store_is_made_again(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer], damage: str
) -> None:
    """R08: a flipped bit gave an id outside the vocabulary and a crash inside the embedding."""
    data = simple(tmp_path, [3, 4, 5])
    store = encode_corpus(data, tokenizers, "train", tmp_path / "store")
    tokens = store.part("target.tokens")
    content = tokens.read_bytes()
    if damage == "flip":
        tokens.write_bytes(content[:5] + bytes([content[5] ^ 64]) + content[6:])
    elif damage == "cut":
        tokens.write_bytes(content[:-2])
    elif damage == "missing":
        store.part("lines").unlink()
    elif damage == "count":
        text = store.index_path.read_text()
        store.index_path.write_text(text.replace('"pairs": 3', '"pairs": 2'))
        assert store.index_path.read_text() != text
    else:
        store.index_path.write_text("{" if damage == "index" else "[" * 100_000)
    again = encode_corpus(data, tokenizers, "train", tmp_path / "store")
    assert not again.reused
    assert tokens.read_bytes() == content
    assert encode_corpus(data, tokenizers, "train", tmp_path / "store").reused


def test_disk_full_is_one_sentence_and_no_store(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """R09: a full disk while encoding gave a traceback and files that the next start mapped."""
    data = simple(tmp_path, [8] * 3000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DataError, match="cannot write the encoded text"):
            encoded(data, tokenizers, tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (kept,) = (tmp_path / "store").iterdir()  # where there is room again, encoding goes on there
    assert kept.suffix == ".partial"
    assert len(encoded(data, tokenizers, tmp_path / "store")) == 3000 and not kept.exists()
    with pytest.raises(DataError, match="cannot write"):
        encoded(data, tokenizers, Path(data.train[0].source) / "store")


def test_gzip_and_windows_files_give_the_same_store(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """T04, T18: carriage returns in the last token of each line; packed bytes taken for text."""
    plain = simple(tmp_path, [3, 6, 4])
    text = Path(plain.train[0].source).read_bytes()
    (tmp_path / "windows.en").write_bytes(text.replace(b"\n", b"\r\n"))
    (tmp_path / "packed.en").write_bytes(gzip.compress(text))
    wanted = encoded(plain, tokenizers, tmp_path / "store")
    for name in ("windows.en", "packed.en"):
        files = CorpusConfig(source=str(tmp_path / name), target=plain.train[0].target)
        found = encoded(data_config([files]), tokenizers, tmp_path / "store")
        assert [found[n].source.tolist() for n in range(3)] == [
            wanted[n].source.tolist() for n in range(3)
        ]
        unpacked = gzip.open if name == "packed.en" else open
        with unpacked(files.source, "rb") as file:
            sums = [hashlib.sha256(file.read()), hashlib.sha256(Path(files.target).read_bytes())]
        assert found.store.index["corpora"][0]["sha256"] == [one.hexdigest() for one in sums]


def test_several_corpora_with_weights(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """The weight of one corpus must reach its own pairs, also when a pair before them is skipped;
    and a new weight must not encode the text again."""
    one = corpus(tmp_path, "one", ["a dog", "", "two men"], ["A DOG", "X", "TWO MEN"])
    two = corpus(tmp_path, "two", ["an old car", "it runs"], ["AN OLD CAR", "IT RUNS"], weight=2.5)
    dataset = encoded(data_config([one, two]), tokenizers, tmp_path / "store")
    assert dataset.pair_numbers.tolist() == [1, 3, 1, 2]
    assert dataset.weights is not None and dataset.weights.tolist() == [1.0, 1.0, 2.5, 2.5]
    assert tokenizers[0].decode(dataset[2].source.tolist()) == "an old car"
    assert dataset.store.text().endswith(f"(line 2 of {one.source})")
    assert [c["pairs"] for c in dataset.store.report()["corpora"]] == [2, 2]
    even = data_config([one, two.model_copy(update={"weight": 1.0})])
    store = encode_corpus(even, tokenizers, "train", tmp_path / "store")
    assert store.reused and TranslationDataset(store).weights is None


def test_progress_counts_pairs(tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """A silent minute of encoding looks like a hang."""
    seen: list[int] = []
    data = simple(tmp_path, [2] * 5000)
    encode_corpus(data, tokenizers, "train", tmp_path / "store", progress=seen.append)
    assert seen[-1] == 5000 and seen == sorted(seen) and len(seen) > 1


def test_store_of_a_killed_encoder_is_swept(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """R08: each kill -9 while encoding left a folder of the size of the corpus for ever; but the
    folder of an encoder that is at work now must stay."""
    store = tmp_path / "store"
    old, new = (store / f"train-0123456789abcde{digit}.partial" for digit in "01")
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    encode_corpus(simple(tmp_path, [3]), tokenizers, "train", store)
    assert not old.exists() and new.exists()


def test_dataset_travels_as_a_name(tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """D13: a dataset sent to a worker process must be mapped there, not copied."""
    dataset = encoded(simple(tmp_path, [9] * 2000), tokenizers, tmp_path / "store")
    packed = pickle.dumps(dataset)
    assert len(packed) < 3000
    assert pickle.loads(packed)[1999].source.tolist() == dataset[1999].source.tolist()


# ---- batches ----------------------------------------------------------------------------------


def ids(values: list[int]) -> np.ndarray:
    return np.array([*values, EOS_ID], dtype=np.uint16)


def test_collate_by_hand() -> None:
    """S22, D02: BOS in front of the decoder input, EOS behind source and target, padding nowhere
    between; an EOS in the decoder input would teach to go on after the end."""
    batch = collate(
        [
            Example(ids([10, 11, 12]), ids([20]), 7),
            Example(ids([13]), ids([21, 22, 23, 24]), 3),
            Example(ids([14, 15]), ids([25, 26]), 9),
        ]
    )
    P, B, E = PAD_ID, BOS_ID, EOS_ID
    assert batch.source.tolist() == [[10, 11, 12, E], [13, E, P, P], [14, 15, E, P]]
    assert batch.target_in.tolist() == [[B, 20, P, P, P], [B, 21, 22, 23, 24], [B, 25, 26, P, P]]
    assert batch.target_out.tolist() == [
        [20, E, P, P, P],
        [21, 22, 23, 24, E],
        [25, 26, E, P, P],
    ]
    assert batch.indices == [7, 3, 9]
    assert (batch.source_tokens, batch.target_tokens) == (9, 10)
    for tensor in (batch.source, batch.target_in, batch.target_out):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_empty_batch_has_no_weight() -> None:
    """R18, M20: a rank without pairs must run a batch, and count nothing."""
    for batch in (empty_batch(), collate([])):
        assert batch.source.shape == batch.target_in.shape == batch.target_out.shape == (1, 1)
        assert batch.target_tokens == 0 and batch.indices == []
        assert batch.target_out.item() == PAD_ID
        assert PAD_ID not in (batch.source.item(), batch.target_in.item())


def plan_of(dataset: TranslationDataset, tokens: int = 60) -> Any:
    def plan(epoch: int) -> EpochPlan:
        lengths = dataset.source_lengths, dataset.target_lengths
        return plan_epoch(1, epoch, *lengths, batch_tokens=tokens)

    return plan


def as_lists(batch: Batch) -> tuple[Any, ...]:
    return (
        batch.source.tolist(),
        batch.target_in.tolist(),
        batch.target_out.tolist(),
        batch.indices,
        batch.source_tokens,
        batch.target_tokens,
    )


def test_workers_change_nothing(tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """D10, D12, D08: each worker read everything; workers kept alive saw one order for ever; a
    resumed loader began the epoch again. 100 pairs, three epochs, kept workers, then a resume."""
    dataset = encoded(
        simple(tmp_path, [1 + n % 13 for n in range(100)]), tokenizers, tmp_path / "s"
    )
    plan = plan_of(dataset)
    torch.manual_seed(11)
    untouched = torch.get_rng_state()
    runs = []
    for workers in (0, 1, 2):
        sampler = TokenBatchSampler(plan)
        loader = batch_loader(dataset, sampler, workers=workers)
        epochs = []
        for epoch in range(3):
            sampler.set_position(epoch)
            epochs.append([as_lists(batch) for batch in loader])
        sampler.set_position(1, 4)
        epochs.append([as_lists(batch) for batch in loader])
        runs.append(epochs)
        del loader
    assert runs[0] == runs[1] == runs[2]
    for epoch in range(3):
        seen = Counter(i for batch in runs[0][epoch] for i in batch[3])
        assert seen == Counter(range(100))
    assert runs[0][0] != runs[0][1] != runs[0][2]
    assert runs[0][3] == runs[0][1][4:]
    assert torch.equal(torch.get_rng_state(), untouched)  # R19: dropout keeps its own numbers


def test_ranks_with_workers_get_an_empty_batch_each(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """R18: the loader must hand over the empty round of a rank like any other, workers or not."""
    dataset = encoded(simple(tmp_path, [5] * 7), tokenizers, tmp_path / "store")
    plan = plan_of(dataset, tokens=1)
    for workers in (0, 1):
        taken = []
        for rank in range(2):
            sampler = TokenBatchSampler(plan, rank=rank, world=2)
            taken.append(
                [batch.indices for batch in batch_loader(dataset, sampler, workers=workers)]
            )
        assert [len(batches) for batches in taken] == [4, 4]
        assert taken[1][3] == []
        assert sorted(i for batches in taken for batch in batches for i in batch) == list(range(7))


def test_validation_covers_all_pairs(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]
) -> None:
    """D06: 10 validation pairs in batches of 4 were scored on 8."""
    dataset = encoded(simple(tmp_path, [3] * 10), tokenizers, tmp_path / "store")

    def plan(epoch: int) -> EpochPlan:
        return plan_epoch(0, epoch, dataset.source_lengths, dataset.target_lengths, batch_size=4)

    batches = list(batch_loader(dataset, TokenBatchSampler(plan)))
    assert sorted(i for batch in batches for i in batch.indices) == list(range(10))
    assert sum(batch.target_tokens for batch in batches) == dataset.target_lengths.sum()


def cut_off(examples: list[Example]) -> Batch:
    """Collate in a worker that a parent asks for a tensor and leaves before it is handed over."""
    left, kept = (resource_sharer.DupFd(1) for _ in range(2))
    Client(left._id[0], authkey=multiprocessing.current_process().authkey).close()
    os.close(kept.detach())  # served after the one that went away
    return collate(examples)


def test_a_parent_that_leaves_a_worker_is_not_a_traceback(
    tmp_path: Path,
    tokenizers: tuple[Tokenizer, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """R20: killed while it took a batch, a run left the traceback of its worker as last words."""
    dataset = encoded(simple(tmp_path, [3] * 4), tokenizers, tmp_path / "store")
    monkeypatch.setattr("mttrain.dataset.collate", cut_off)
    loader = batch_loader(dataset, TokenBatchSampler(plan_of(dataset)), workers=1)
    assert sorted(i for batch in loader for i in batch.indices) == list(range(4))
    assert capfd.readouterr().err == ""


LOADER = """
import multiprocessing, sys
from pathlib import Path
from mttrain.batching import TokenBatchSampler, plan_epoch
from mttrain.config import CorpusConfig, DataConfig
from mttrain.dataset import TranslationDataset, batch_loader, encode_corpus
from mttrain.tokenizer import train_tokenizer
multiprocessing.set_start_method(sys.argv[2])
folder = Path(sys.argv[1])
lines = [f"line {n} of some text" for n in range(300)]
for name in ("t.en", "t.de"):
    (folder / name).write_text("".join(line + chr(10) for line in lines))
files = CorpusConfig(source=str(folder / "t.en"), target=str(folder / "t.de"))
data = DataConfig(source_lang="en", target_lang="de", train=[files], valid=files)
tokenizer = train_tokenizer(lines, vocab_size=300)
dataset = TranslationDataset(encode_corpus(data, (tokenizer, tokenizer), "train", folder / "s"))
lengths = dataset.source_lengths, dataset.target_lengths
sampler = TokenBatchSampler(lambda epoch: plan_epoch(1, epoch, *lengths, batch_tokens=200))
loader = batch_loader(dataset, sampler, workers=2)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("print(sum(len(batch.indices) for batch in loader))", "300\n"),
        ("batches = iter(loader)\nnext(batches)\nkept = [batches]\nkept.append(kept)", ""),
    ],
    ids=["an epoch", "cut short"],
)
def test_workers_after_tokenizing_are_silent(
    tmp_path: Path, method: str, work: str, said: str
) -> None:
    """D15: tokenizer threads before a fork made the workers hang, or warn once for each worker.
    Those of a fork server, which Python 3.14 has by default, took its pid for a dead parent's. An
    exit in the middle of an epoch does not wait for workers that are deaf to SIGTERM."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADER + work, str(tmp_path), method],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == (said, "", 0)


def test_report_is_json(tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """The log takes the report as it is: a numpy number in it would end the run."""
    store: EncodedCorpus = encode_corpus(simple(tmp_path, [2, 3]), tokenizers, "train", tmp_path)
    report = json.loads(json.dumps(store.report()))
    assert report["lines"] == report["pairs"] == 2 and report["split"] == "train"


# ---- parts of a batch --------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    cells=st.integers(1, 60),
)
def test_parts_hold_every_pair_once_in_order_and_keep_their_size(
    lengths: list[tuple[int, int]], cells: int
) -> None:
    """A batch is computed in parts on a CPU: nothing may be lost or padded more than before."""
    examples = [
        Example(np.arange(4, 4 + s), np.arange(4, 4 + t), i) for i, (s, t) in enumerate(lengths)
    ]
    batch = collate(examples)
    parts = list(batch.parts(cells))
    assert [i for part in parts for i in part.indices] == batch.indices
    assert sum(part.source_tokens for part in parts) == batch.source_tokens
    assert sum(part.target_tokens for part in parts) == batch.target_tokens
    for part in parts:
        alone = collate([examples[i] for i in part.indices])
        for name in ("source", "target_in", "target_out"):
            assert torch.equal(getattr(part, name), getattr(alone, name))
        rows, longest = len(part.indices), max(part.source.shape[1], part.target_out.shape[1])
        assert (rows - 1) * longest <= cells


def test_an_empty_batch_is_its_own_part() -> None:
    """The rank without pairs must still run one forward and backward pass."""
    parts = list(empty_batch().parts(100))
    assert len(parts) == 1 and parts[0].target_tokens == 0
