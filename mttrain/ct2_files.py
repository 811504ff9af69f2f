"""The directory of a model exported for CTranslate2: what lies in it, and whether it is whole.

    model.bin                 the weights, in the library's own format
    config.json               its settings: the special tokens, the epsilon of layer norm
    shared_vocabulary.json    the tokens by id; or source_vocabulary.json and target_vocabulary.json
    tokenizer.json            ours; or tokenizer.source.json and tokenizer.target.json
    meta.json                 that of the checkpoint, with the hashes of these files and how the
                              export was made

Tokens are called as tokenizer.json calls them, where no two are alike; so the `tokenizers` library
alone turns text into what CTranslate2 reads. Price: every file is read once to compare its hash.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mttrain.checkpoint import check_tokenizers
from mttrain.corpus import file_sha256, load_json
from mttrain.errors import CheckpointError, MissingDependency, TokenizerError
from mttrain.rundir import META, SHARED, SOURCE, TARGET, read_json, typed_field
from mttrain.tokenizer import Tokenizer

FORMAT = "ctranslate2"
MODEL_FILE = "model.bin"
VOCABULARIES = {
    "shared": "shared_vocabulary.json",
    "source": "source_vocabulary.json",
    "target": "target_vocabulary.json",
}
_LARGEST_VOCABULARY = 64 << 20  # bytes


def require_ctranslate2() -> Any:
    """The library, or MissingDependency."""
    try:
        import ctranslate2
    except ImportError:
        raise MissingDependency(
            "The ctranslate2 package is not installed: pip install 'mttrain[export]'"
        ) from None
    ctranslate2.set_log_level(logging.ERROR)  # what it would warn of is refused or reported here
    return ctranslate2


@dataclass(frozen=True)
class ExportedModel:
    """What an exported directory says of its model, beside the weights."""

    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    meta: dict[str, Any]
    path: Path


def is_exported(path: str | Path) -> bool:
    """Whether this is a directory that `mttrain export --to ctranslate2` made."""
    return (Path(path) / META).is_file() and (Path(path) / MODEL_FILE).is_file()


def verified(folder: Path) -> tuple[ExportedModel, tuple[list[str], list[str]]]:
    """What the directory says of its model, and its vocabularies, all files as they were written.

    CheckpointError when one is missing, is damaged, or does not fit the others.
    """
    if not is_exported(folder):
        raise CheckpointError(
            f"{folder} is no directory of `mttrain export --to ctranslate2` ({MODEL_FILE} and "
            f"{META} are not both there)."
        )
    meta = read_json(folder / META)
    facts = typed_field(meta, "export", dict, folder / META)
    typed_field(facts, "positions", int, folder / META)
    typed_field(facts, "quantization", str, folder / META)
    if facts.get("to") != FORMAT or not isinstance(facts.get("learned_positions"), bool):
        raise CheckpointError(f"{folder / META} describes no export for CTranslate2.")
    files = typed_field(meta, "files", dict, folder / META)
    shared = (folder / SHARED).exists()
    tokenizers = [SHARED] if shared else [SOURCE, TARGET]
    joint = (folder / VOCABULARIES["shared"]).exists()
    names = ["shared"] if joint else ["source", "target"]
    for name in (MODEL_FILE, "config.json", *tokenizers, *(VOCABULARIES[n] for n in names)):
        _check_file(folder / name, files.get(name))
    sides = [_tokenizer(folder / name) for name in tokenizers]
    typed_field(meta, "tokenizer_hash", dict, folder / META)
    check_tokenizers(meta, (sides[0], sides[-1]), folder)
    tokens = [stored_tokens(folder / name) for name in tokenizers]
    found = [_vocabulary(folder / VOCABULARIES[name]) for name in names]
    if [tokens[0], tokens[-1]] != [found[0], found[-1]]:
        raise CheckpointError(f"{folder}: the vocabularies are not those of the tokenizers.")
    return ExportedModel(sides[0], sides[-1], meta, folder), (tokens[0], tokens[-1])


def stored_tokens(path: Path) -> list[str]:
    """The tokens of a tokenizer.json by id, as the file writes them: no two are alike."""
    vocab: dict[str, int] = load_json(path, _LARGEST_VOCABULARY)["model"]["vocab"]
    return sorted(vocab, key=vocab.__getitem__)


def _vocabulary(path: Path) -> list[str]:
    try:
        content = load_json(path, _LARGEST_VOCABULARY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read it: {str(error)[:100]}.") from None
    return content if isinstance(content, list) else []


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except TokenizerError as error:
        raise CheckpointError(str(error)) from None


def _check_file(path: Path, wanted: object) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the exported directory is incomplete.")
    if file_sha256(path) != wanted:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {META}.")
