#!/usr/bin/env python3
"""Fetch the Multi30k corpus (task 1, raw text) into data/multi30k, checking every file's sum.

    scripts/get_multi30k.py [--output data/multi30k] [--languages en de fr] [--from DIR]

29,000 training, 1,014 validation and 1,000 test sentences (image captions; Elliott et al. 2016,
"Multi30K: Multilingual English-German Image Descriptions"; French: Elliott et al. 2017) from the
public repository github.com/multi30k/dataset, about 2 MB packed. `--from DIR` reads the packed
files from a folder instead, e.g. `data/task1/raw` of a clone of that repository. Nothing is written
unless its SHA-256 is the expected one, and a file appears under its name only when it is complete.
Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import sys
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
PROJECT = Path(__file__).resolve().parent.parent
SHA256 = {
    "train.en": "e1d89f49b9f003db6bb35c24382eb56531fec4e3840cb704cf36f0c0e192b62d",
    "train.de": "d71259ddb13479e1c9cac315c123493b7e97d2c996465b76d885a80a9e8daccd",
    "train.fr": "41e4a42abcf242f69c88814fe0f8df106d877f0b07482c841f6063e3ed739039",
    "val.en": "0a9a01b4fd231cafeebea18983300016112dc919d3b26c5c74f6d6f388936aeb",
    "val.de": "c7c5fd8dde71846406de776f1c342f0c1e95e1c375e3bea7d52a77faec72e965",
    "val.fr": "9ccb4038b407530093f76c4aa5e955842303e96b0bdef3c626a0c8320d450f36",
    "test_2016_flickr.en": "4f32cb8118b90cd5189d141e34791f70c245315e17065ecf9b2af6ab57e747cf",
    "test_2016_flickr.de": "d9747e9ef1c1bf36bf4a0e43c0d0fba58cc55d6b2b8e388cc863cba02b043fea",
    "test_2016_flickr.fr": "aaa466eae473f1807a1b4a1683e18b6bba1234aee4ebf70e04bbc11d1e87d2be",
}
"""File (without .gz) -> SHA-256 of the packed file."""


class FetchError(Exception):
    """The text is the whole message."""


def read_packed(name: str, folder: Path | None) -> tuple[str, bytes]:
    """The place and the bytes of `name`.gz, from `folder` or from the network."""
    if folder is not None:
        path = folder / f"{name}.gz"
        try:
            return str(path), path.read_bytes()
        except OSError as error:
            raise FetchError(f"cannot read {path}: {error.strerror}") from error
    url = f"{URL}/{name}.gz"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return url, answer.read()
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", error)
        raise FetchError(
            f"cannot fetch {url}: {reason}; with the packed files in a folder, use --from DIR"
        ) from error


def fetch(name: str, output: Path, folder: Path | None) -> int:
    """Write `output`/`name`; returns its number of lines."""
    place, packed = read_packed(name, folder)
    found = hashlib.sha256(packed).hexdigest()
    if found != SHA256[name]:
        raise FetchError(f"{place} has SHA-256 {found}, expected {SHA256[name]}; nothing written")
    try:
        text = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise FetchError(f"cannot unpack {place}: {error}") from error
    target = output / name
    temporary = output / f".{name}.tmp-{os.getpid()}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise FetchError(f"cannot write {target}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return text.count(b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the Multi30k corpus, checking its sums.")
    parser.add_argument("--output", type=Path, default=PROJECT / "data" / "multi30k", metavar="DIR")
    parser.add_argument(
        "--languages", nargs="+", choices=["en", "de", "fr"], default=["en", "de", "fr"]
    )
    parser.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="packed files")
    arguments = parser.parse_args()
    names = [name for name in SHA256 if name.rsplit(".", 1)[1] in arguments.languages]
    try:
        for name in names:
            lines = fetch(name, arguments.output, arguments.folder)
            print(f"{arguments.output / name}: {lines} lines", file=sys.stderr)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
