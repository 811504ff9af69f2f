"""Where the ranks of a job meet, when torchrun may start them again.

torchrun keeps one key-value store over all its restarts, and PyTorch's process group looks up the
addresses of its ranks under the same keys each time: after a restart a rank finds those of the dead
(pytorch/pytorch issue 135712). The count of restarts that torchrun tells is each node's own, so it
cannot tell the starts apart. Here the ranks agree on a word for this start, in the same store, that
no earlier one can have left there, and the keys of the process group stand below it.

Price: a few reads of the store for each rank, once.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_PAUSE = 0.05  # seconds between two looks


def meet(rank: int, size: int, patience: timedelta) -> Store:
    """The store of this start of the job, for `init_process_group`; when all ranks are there.

    Raises a DistError when the store cannot be reached, or after `patience`.
    """
    store: Store = next(rendezvous("env://", rank, size, timeout=patience))[0]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # rank 0 keeps it, and it dies with rank 0
    word = agreed_word(store, rank, size, patience)
    return PrefixStore(f"mttrain/start/{word}", store)


def agreed_word(store: Store, rank: int, size: int, patience: timedelta) -> str:
    """A random word that all ranks have after they called this, whatever earlier calls left.

    A rank calls with a word of its own, under a key that an earlier start may have used; rank 0
    answers under a key that holds the caller's word, and so is new, with its own word; the caller
    confirms that. Rank 0 answers what calls it finds until all have confirmed.
    """
    mine = secrets.token_hex(8)
    if rank != 0:
        store.set(f"mttrain/call/{rank}", mine)
        answer = f"mttrain/answer/{rank}/{mine}"
        store.wait([answer], patience)
        word = store.get(answer).decode()
        store.set(f"mttrain/confirmed/{word}/{rank}", "yes")
        return word
    deadline = time.monotonic() + patience.total_seconds()
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"mttrain/confirmed/{mine}/{other}"]):
                missing.discard(other)
            elif store.check([f"mttrain/call/{other}"]):
                call = store.get(f"mttrain/call/{other}").decode()
                store.set(f"mttrain/answer/{other}/{call}", mine)
        if missing and time.monotonic() > deadline:
            raise DistStoreError(f"rank {min(missing)} has not come to the rendezvous")
        time.sleep(_PAUSE)
    return mine
