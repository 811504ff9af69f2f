"""BPE-dropout: the published distribution, the same for the same seed, and never a lost byte."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mttrain.batching import TokenBatchSampler, plan_epoch
from mttrain.bpedropout import (
    MergeTable,
    Ragged,
    WordCounter,
    WordSampler,
    block_words,
    ragged,
    segment,
)
from mttrain.config import CorpusConfig, DataConfig
from mttrain.corpus import write_lines
from mttrain.dataset import Batch, TranslationDataset, batch_loader, encode_corpus
from mttrain.hashing import absorb, as_keys
from mttrain.tokenizer import Tokenizer, train_tokenizer

TEXT = ["a banana bandana", "banana bananas and", "aaaa aaa aa aaaa", "an ananas band"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=290)


def byte_ids(tokenizer: Tokenizer, words: Sequence[str]) -> Ragged:
    single = {row[0]: i for i, row in enumerate(tokenizer.byte_rows()) if len(row) == 1}
    assert all(key == index for key, index in single.items())
    plain = {tokenizer.decode([i]): i for i in single}
    return ragged([[plain[letter] for letter in word] for word in words])


def published(
    tokenizer: Tokenizer, word: Sequence[int], dropout: float
) -> dict[tuple[int, ...], float]:
    """The exact distribution of algorithm 1 of the paper, by trying every subset of the merges that
    may be left out at every step."""
    ranks = {(a, b): (rank, c) for rank, (a, b, c) in enumerate(tokenizer.merge_ids())}

    @cache
    def ends(ids: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], float], ...]:
        possible = [i for i in range(len(ids) - 1) if ids[i : i + 2] in ranks]
        total: Counter[tuple[int, ...]] = Counter()
        for kept in itertools.product((True, False), repeat=len(possible)):
            chance = math.prod(1 - dropout if keep else dropout for keep in kept)
            left = [i for i, keep in zip(possible, kept, strict=True) if keep]
            if not left:
                total[ids] += chance
                continue
            best = min(ranks[ids[i : i + 2]] for i in left)
            merged, at = [], 0
            while at < len(ids):
                if at in left and ranks[ids[at : at + 2]] == best:
                    merged.append(best[1])
                    at += 2
                else:
                    merged.append(ids[at])
                    at += 1
            for end, share in ends(tuple(merged)):
                total[end] += chance * share
        return tuple(total.items())

    return dict(ends(tuple(word)))


@pytest.mark.parametrize("word", ["banana", " banan", "aaaaa", "band", "an", "x"])
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_the_distribution_is_the_published_one(
    tokenizer: Tokenizer, word: str, dropout: float
) -> None:
    """Leaving out merges once per word, or for good, gives other and fewer segmentations."""
    draws = 40_000
    letters = byte_ids(tokenizer, [word])
    keys = absorb(as_keys([7]), np.arange(draws, dtype=np.uint64))
    words = letters.take(np.zeros(draws, dtype=np.int64))
    found = segment(MergeTable(tokenizer), words, keys, dropout)
    seen = Counter(tuple(found.rows(i, i + 1).values.tolist()) for i in range(draws))
    wanted = published(tokenizer, letters.values.tolist(), dropout)
    assert math.isclose(sum(wanted.values()), 1.0)
    assert set(seen) <= set(wanted)
    for ids, chance in wanted.items():
        # Five standard deviations of a count, for some hundred counts.
        room = 5 * math.sqrt(draws * chance * (1 - chance)) + 1
        assert abs(seen[ids] - draws * chance) <= room, ids


@given(st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_nothing_left_out_is_the_vocabularys_own_segmentation(texts: list[str]) -> None:
    tokenizer = _learned()
    for rate, rows in ((0.0, tokenizer.encode_batch(texts)), (0.5, None)):
        sampler, _ = counted(tokenizer, texts, rate)
        words = sampler.epoch(3)
        assert words.lengths.tolist() == [len(_row(words, i)) for i in range(len(texts))]
        for number, text in enumerate(texts):
            row = _row(words, number)
            assert tokenizer.decode(row) == text
            if rows is not None:
                assert row == rows[number]


@lru_cache(maxsize=1)
def _learned() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=290)


def _row(words: object, number: int) -> list[int]:
    found: list[int] = words.rows(np.array([number])).values.tolist()  # type: ignore[attr-defined]
    return found


def counted(
    tokenizer: Tokenizer, texts: Sequence[str], rate: float, seed: int = 1, block: int = 3
) -> tuple[WordSampler, Ragged]:
    """The words of texts that are encoded block by block."""
    counter, numbers, counts, found = WordCounter(), [], [], []
    for at in range(0, len(texts), block):
        made = block_words(*tokenizer.encode_words(texts[at : at + block]))
        types = Ragged(made["types"], np.concatenate([[0], np.cumsum(made["type_lengths"])]))
        number, fresh = counter.number(types)
        found += [types.rows(i, i + 1).values.tolist() for i in np.flatnonzero(fresh).tolist()]
        numbers.append(number[made["words"]])
        counts.append(made["word_counts"])
    words = Ragged(
        np.concatenate(numbers), np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    )
    return WordSampler(tokenizer, ragged(found), words, rate, seed), ragged(found)


def test_everything_left_out_is_bytes(tokenizer: Tokenizer) -> None:
    sampler, _ = counted(tokenizer, TEXT, 1.0)
    assert sampler.epoch(0).lengths.tolist() == [len(text) for text in TEXT]


def test_epochs_and_seeds_differ_and_come_again(tokenizer: Tokenizer) -> None:
    """R19: drawn from a stream, the segmentation of an epoch would depend on the epochs before."""
    rows = {}
    for seed in (1, 2):
        for epoch in (1, 0, 1):
            sampler, _ = counted(tokenizer, TEXT, 0.5, seed)
            drawn = sampler.epoch(epoch)
            new = [_row(drawn, i) for i in range(len(TEXT))]
            assert rows.setdefault((seed, epoch), new) == new
    assert len({str(row) for row in rows.values()}) == len(rows)
    again = rows[1, 0]
    assert len({str(again[i]) for i in range(0, len(TEXT), 4)}) > 1, "the same text is cut anew"


def test_different_words_are_counted_once(tokenizer: Tokenizer) -> None:
    _, types = counted(tokenizer, ["band band", "", "band", " band a"], 0.5)
    texts = [tokenizer.decode(types.rows(i, i + 1).values.tolist()) for i in range(len(types))]
    assert sorted(texts) == [" a", " band", "band"]


# ---- in a dataset ------------------------------------------------------------------------------


@pytest.fixture
def dropping(tmp_path: Path, tokenizer: Tokenizer) -> TranslationDataset:
    words = ["a", "an", "band", "banana", "bananas", "bandana", "and", "ananas"]
    lines = [" ".join(words[i % 8 :: 1 + i % 3]) for i in range(300)]
    files = {name: str(tmp_path / name) for name in ("source", "target")}
    write_lines(files["source"], lines)
    write_lines(files["target"], reversed(lines))
    corpus = CorpusConfig(**files)
    data = DataConfig(
        source_lang="en", target_lang="de", train=[corpus], valid=corpus, max_length=24
    )
    pair = (tokenizer, tokenizer)
    store = encode_corpus(data, pair, "train", tmp_path / "store", words=True)
    assert encode_corpus(data, pair, "train", tmp_path / "store", words=True).reused
    assert not encode_corpus(data, pair, "train", tmp_path / "store").reused
    return TranslationDataset(store, pair, 0.4, 5)


def sampler_of(dataset: TranslationDataset) -> TokenBatchSampler:
    return TokenBatchSampler(
        lambda epoch: plan_epoch(1, epoch, *dataset.lengths(epoch), batch_tokens=200)
    )


def content(batch: Batch) -> list[list[int]]:
    return [batch.indices, *batch.source.tolist(), *batch.target_out.tolist()]


def test_batches_hold_their_budget_and_their_text(
    dropping: TranslationDataset, tokenizer: Tokenizer
) -> None:
    """T07: lengths of the plain segmentation let batches grow by half; and a pair that grew beyond
    data.max_length is no longer than it was allowed to be."""
    plain = dropping.source_lengths, dropping.target_lengths
    cut = 0
    for epoch in range(2):
        sampler = sampler_of(dropping)
        sampler.set_position(epoch)
        for batch in batch_loader(dropping, sampler):
            assert max(batch.source.numel(), batch.target_out.numel()) <= 200
            assert max(batch.source.shape[1], batch.target_out.shape[1]) <= 24
            for row, index in zip(batch.source.tolist(), batch.indices, strict=True):
                assert tokenizer.decode(row) == tokenizer.decode(dropping[index].source.tolist())
            cut += batch.source_tokens - int(plain[0][batch.indices].sum())
    assert cut > 0
    lengths = dropping.lengths(0)
    assert any(
        (drawn == whole).any() and (drawn > whole).any()
        for drawn, whole in zip(lengths, plain, strict=True)
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_cut_as_the_main_process_does(dropping: TranslationDataset, workers: int) -> None:
    """Workers that live for several epochs must cut each of them anew."""
    samplers = [sampler_of(dropping) for _ in range(2)]
    loaders = [
        batch_loader(dropping, sampler, workers=number)
        for sampler, number in zip(samplers, (0, workers), strict=True)
    ]
    seen = []
    for epoch in (0, 1, 4):
        for sampler in samplers:
            sampler.set_position(epoch)
        one, two = ([content(batch) for batch in loader] for loader in loaders)
        assert one == two
        seen.append(str(one))
    assert len(set(seen)) == 3


def test_a_loader_gives_tensors_of_plain_type(dropping: TranslationDataset) -> None:
    batch = next(iter(batch_loader(dropping, sampler_of(dropping))))
    assert batch.source.dtype == batch.target_out.dtype == torch.int64
