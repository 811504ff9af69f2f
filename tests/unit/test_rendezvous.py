"""The word that the ranks of one start agree on, in a store that earlier starts have used."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistError, HashStore

from mttrain.rendezvous import agreed_word

SOON = timedelta(seconds=60)


def words(store: HashStore, size: int, reverse: bool = False) -> list[str]:
    """What each rank of one start takes home."""
    found: dict[int, str] = {}

    def call(rank: int) -> None:
        found[rank] = agreed_word(store, rank, size, SOON)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in reversed(threads) if reverse else threads:
        thread.start()
        thread.join(0.15)  # the others come later
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(size)]


def test_each_start_has_a_word_of_its_own() -> None:
    """After a restart by torchrun the ranks looked for each other where the dead had been."""
    store = HashStore()
    starts = [words(store, 3), words(store, 3), words(store, 3, reverse=True), words(store, 2)]
    assert all(len(set(start)) == 1 for start in starts)
    assert len({start[0] for start in starts}) == len(starts)


def test_a_rank_that_stays_away_is_told() -> None:
    with pytest.raises(DistError, match="rank 1 has not come"):
        agreed_word(HashStore(), 0, 2, timedelta(seconds=0.1))
    with pytest.raises(DistError, match="timeout"):
        agreed_word(HashStore(), 1, 2, timedelta(seconds=0.1))
