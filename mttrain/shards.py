"""A corpus in many files: which ones a pattern names, and which source belongs to which target.

"*" stands for any characters of a path between two slashes and "?" for one, but not, as in a shell,
for the dot of a hidden file. What the wildcards stand for tells the shards apart, so one that is
missing on one side is an error and never shifts the others.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from mttrain.errors import DataError

_WILD = re.compile(r"([*?])")
_FORMS = {"*": "([^/]*)", "?": "([^/])"}


def is_pattern(name: str) -> bool:
    """Whether this names files by wildcards; a file that is called so comes first."""
    return bool(_WILD.search(name)) and not os.path.exists(name)


def matching(patterns: Sequence[str]) -> list[list[str]]:
    """The files of each pattern, in order; the n-th ones of all patterns belong together.

    A name without wildcards is one file, whether it exists or not. Of several patterns the
    wildcards must stand for the same text: data/*.en and data/*.de give data/0.en and data/0.de.
    DataError: no such file, or one that has no partner.
    """
    found = [_matches(pattern) for pattern in patterns]
    keys = sorted(found[0])
    for pattern, files in zip(patterns[1:], found[1:], strict=True):
        if len(keys) == len(files) == 1:
            files[keys[0]] = files.pop(next(iter(files)))
        for key in sorted(found[0].keys() ^ files.keys()):
            name, missing = (files[key], patterns[0]) if key in files else (found[0][key], pattern)
            raise DataError(
                f"{name} has no partner among the files of {missing}; each shard needs one of both "
                "sides, with the same text in place of the wildcards."
            )
    return [[files[key] for key in keys] for files in found]


def _matches(pattern: str) -> dict[tuple[str, ...], str]:
    """What the wildcards stand for -> the file."""
    if not is_pattern(pattern):
        return {(): pattern}
    parts = _WILD.split(pattern)
    form = re.compile("".join(_FORMS.get(part) or re.escape(part) for part in parts), re.DOTALL)
    names = glob.glob(pattern.replace("[", "[[]"))
    found = {match.groups(): name for name in names if (match := form.fullmatch(name))}
    if not found:
        raise DataError(f"{pattern}: no file has such a name (relative to {os.getcwd()}).")
    return found
