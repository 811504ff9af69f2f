"""The public test sets that sacreBLEU knows, as files on this machine.

sacreBLEU fetches a set at its first use and keeps it in the directory SACREBLEU (~/.sacrebleu);
from then on no network is needed.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mttrain.errors import ConfigError, DataError


def public_test_set(name: str, langs: tuple[str, str]) -> tuple[str, list[str]]:
    """Source file and reference files of a test set such as "wmt14" or "wmt14/full".

    ConfigError: no such set or direction. DataError: it is not here and cannot be fetched.
    """
    from sacrebleu.dataset import DATASETS

    direction = "-".join(langs)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ConfigError(f"sacreBLEU knows no test set {name!r}{hint}")
    data = DATASETS[name]
    if direction not in data.langpairs:
        known = ", ".join(sorted(data.langpairs))
        raise ConfigError(f"The test set {name} has no {direction}; it has {known}.")
    with _fetching(name):
        source: str = data.get_source_file(direction)  # type: ignore[no-untyped-call]
        references: list[str] = data.get_reference_files(direction)  # type: ignore[no-untyped-call]
        return source, references


@contextmanager
def _fetching(name: str) -> Iterator[None]:
    """What sacreBLEU does where there is no network: an error of urllib, or the end of the program
    after a message of its own."""
    import sacrebleu.utils

    where = sacrebleu.utils.SACREBLEU_DIR
    log = logging.getLogger("sacrebleu")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except (OSError, SystemExit, EOFError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(
            f"The test set {name} is not in {where} and could not be fetched ({reason}). On a "
            f"machine with a network run `sacrebleu --download {name}`, and copy that directory."
        ) from None
    finally:
        log.setLevel(level)
