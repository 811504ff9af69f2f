"""Byte-level BPE: learn it, store it, text to ids and back without losing a byte.

Text is cut into pieces (words with their leading space, numbers, runs of signs), each piece is
taken as UTF-8 bytes, and pairs are merged in the order learned (Sennrich et al. 2016; on bytes as
in Radford et al. 2019). All 256 bytes are in the vocabulary, so there are no unknown characters,
and decode(encode(x)) == x for every text. There is no Unicode normalisation: composed and
decomposed letters stay what they are, in training as in translation.

Two levels share one file format. "subword" merges inside pieces; Chinese and Japanese runs are
pieces of their own, apart from Latin words and digits, and no piece is longer than 64 characters,
so that a blob without spaces costs no more than a text of its size. "character" merges only inside
a character: one token for each character seen twice, bytes for the rest.

The file is the `tokenizers` library's JSON. The special tokens are ordinary entries with ids 0 to 3
which no merge leads to, rather than "added tokens": so no text, not even a literal "</s>", yields a
control id, whichever program reads the file. The same goes for tags (module `tags`): a tag is an
entry of their form that no merge leads to. On two cores, learning from 4 MB takes about a second
(Chinese takes 2 to 3 s per MB, since few of its runs repeat); encoding runs at about 4 MB/s.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from mttrain.corpus import atomic_write_text, in_blocks, load_json
from mttrain.errors import ConfigError, DataError, TokenizerError
from mttrain.tags import name_in_token, tag_token

PAD_ID, UNK_ID, BOS_ID, EOS_ID = 0, 1, 2, 3
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
MIN_VOCAB_SIZE = len(SPECIAL) + 256

# The library starts threads. A process forked after that must not wait for them (they do not exist
# there), and must not print the library's warning about it: parallel here, sequential in children.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=lambda: os.environ.__setitem__("TOKENIZERS_PARALLELISM", "false")
    )

# A merge seen once is a copy of one place in the text.
_MIN_FREQUENCY = 2
_LARGEST_FILE = 64 << 20  # bytes: a vocabulary of half a million entries
BLOCK = 2000  # lines handed over at a time: threads stay busy, memory stays small

_CJK = r"\p{Han}\p{Hiragana}\p{Katakana}ー〆ｰ"
_PIECES = "|".join(
    (
        r"[\r\n]",  # never part of a longer token
        r"['’](?i:s|t|re|ve|m|ll|d)(?![\p{L}\p{M}])",  # English contractions
        rf"[{_CJK}]{{1,64}}",
        # Words; joiners (ZWNJ, ZWJ) belong to Persian, Sinhala and other words.
        rf" ?[\p{{L}}\p{{M}}&&[^{_CJK}]][\p{{L}}\p{{M}}\x{{200c}}\x{{200d}}&&[^{_CJK}]]{{0,63}}",
        r" ?\p{N}{1,64}",
        r" ?[^\s\p{L}\p{M}\p{N}][^\s\p{L}\p{N}]{0,63}",  # signs and emoji with their modifiers
        r"[^\S\r\n]{1,64}(?!\S)",  # leaves the last space to the word after it
        r"[^\S\r\n]{1,64}",
    )
)
_CHARACTERS = r"[\s\S]"


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_LEVELS = {"subword": _pre_tokenizer(_PIECES), "character": _pre_tokenizer(_CHARACTERS)}


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a stored token stands for.

    Printable Latin-1 stands for itself, the other bytes, in order, for U+0100 onwards (Radford et
    al. 2019, encoder.py): tokens stay readable and hold neither spaces nor control characters.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(b): b for b in own} | {chr(0x100 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Tokenizer:
    """A vocabulary with its merges. Make one with `Tokenizer.load` or `train_tokenizer`.

    Immutable; ids are list indices: the four special tokens, tags, 256 bytes, then the merges.
    `tags` has the id of each tag by its name.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[Sequence[str]],
        pre_tokenizer: dict[str, Any],
    ) -> None:
        self._content = _content(tokens, merges, pre_tokenizer)
        self._inner = tokenizers.Tokenizer.from_str(json.dumps(self._content))
        self._inner.encode_special_tokens = True  # not stored by the library; a second lock
        self.tags = _tags(tokens, merges)
        self._bytes = [_token_bytes(token) for token in tokens]
        for index in (*range(len(SPECIAL)), *self.tags.values()):
            self._bytes[index] = b""
        self.newline_ids = frozenset(
            index for index, data in enumerate(self._bytes) if b"\n" in data or b"\r" in data
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer.json; whatever is wrong with it is told as one TokenizerError."""
        try:
            data = load_json(path, _LARGEST_FILE)
        except OSError as error:
            raise TokenizerError(f"{path}: cannot read the tokenizer: {error.strerror}.") from None
        except ValueError as error:
            reason = f"no valid JSON: {str(error)[:100]}"
            raise TokenizerError(f"{path}: not a tokenizer file ({reason}).") from None
        try:
            return cls(*_checked_parts(data))
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())[:200]
            raise TokenizerError(f"{path}: not a usable tokenizer file: {reason}.") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokenizer.json in one step; equal tokenizers give equal bytes."""
        text = json.dumps(self._content, ensure_ascii=False, indent=1)
        atomic_write_text(path, text + "\n")

    @property
    def size(self) -> int:
        """How many ids there are, the special ones included."""
        return len(self._bytes)

    @property
    def of_characters(self) -> bool:
        """Whether a token is one character at most (`level: character`)."""
        return bool(self._content["pre_tokenizer"] == _LEVELS["character"])

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that decides ids: the same for a saved and reloaded tokenizer."""
        model = self._content["model"]
        parts = [list(model["vocab"]), model["merges"], self._content["pre_tokenizer"]]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS and EOS; never a special id or a tag."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_words(self, texts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
        """`encode_batch`, and for each id which word of its text (from 0) it belongs to.

        A word is a piece of text inside which tokens are merged.
        """
        encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        # Only special tokens belong to no word, and there are none.
        words: list[list[Any]] = [encoding.word_ids for encoding in encodings]
        return [encoding.ids for encoding in encodings], words

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids: special ones, tags dropped; bytes that are not UTF-8 as U+FFFD."""
        return b"".join([self._bytes[index] for index in ids]).decode("utf-8", errors="replace")

    def byte_rows(self) -> list[list[int]]:
        """For each id the ids of its single bytes: what it is before any merge.

        A tag is whole: no merge makes it, so that BPE-dropout cannot cut it.
        """
        own = {data[0]: index for index, data in enumerate(self._bytes) if len(data) == 1}
        rows = [[own[byte] for byte in data] for data in self._bytes]
        for index in self.tags.values():
            rows[index] = [index]
        return rows

    def merge_ids(self) -> list[tuple[int, int, int]]:
        """(left, right, merged) of all merges by id, the one learned first in front."""
        model = self._content["model"]
        vocab = model["vocab"]
        return [(vocab[one], vocab[two], vocab[one + two]) for one, two in model["merges"]]

    def pieces(self, text: str) -> list[str]:
        """The tokens of a text as `token` writes them; none holds white space."""
        return [self.token(index) for index in self.encode(text)]

    def token(self, index: int) -> str:
        """A token for the eye: "▁" is a space, <0xE4> a byte that is no printable character."""
        if index < len(SPECIAL):
            return SPECIAL[index]
        return self._tag_tokens.get(index) or _visible(self._bytes[index])

    def piece_id(self, piece: str) -> int | None:
        """The id that `token` writes as `piece`: pieces can be turned back into text."""
        return self._by_piece.get(piece)

    @cached_property
    def _tag_tokens(self) -> dict[int, str]:
        return {index: tag_token(name) for name, index in self.tags.items()}

    @cached_property
    def _by_piece(self) -> dict[str, int]:
        return {self.token(index): index for index in reversed(range(self.size))}


def _tags(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> dict[str, int]:
    """Name -> id of the entries that look like a tag and that no merge leads to."""
    merged = {"".join(pair) for pair in merges}
    names = [(name_in_token(token), token, index) for index, token in enumerate(tokens)]
    return {name: index for name, token, index in names if name and token not in merged}


def _token_bytes(token: str) -> bytes:
    return bytes(_ALPHABET[character] for character in token)


def _visible(data: bytes) -> str:
    """Bytes as text without white space, and without two tokens that look the same."""
    text = data.decode("utf-8", errors="surrogateescape")
    parts = ["".join(map(_visible_character, part)) for part in text.split("<0x")]
    return "<0x3C>0x".join(parts)  # a literal "<0x" is not the sign for a byte


def _visible_character(character: str) -> str:
    if character == " ":
        return "▁"
    if character.isprintable() and character != "▁":
        return character
    return "".join(f"<0x{byte:02X}>" for byte in character.encode("utf-8", "surrogateescape"))


# ---- the file ---------------------------------------------------------------------------------


def _content(
    tokens: Sequence[str], merges: Sequence[Sequence[str]], pre_tokenizer: dict[str, Any]
) -> dict[str, Any]:
    """The file's content: nothing but what these three decide."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _checked_parts(data: object) -> tuple[list[str], list[list[str]], dict[str, Any]]:
    """Tokens, merges and pre-tokenizer of a parsed file, or TokenizerError (without the path).

    Settings of other tools that only concern padding, dropout or decoding are left behind.
    """
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(model, dict):
        raise TokenizerError("not a tokenizer file.")
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"the model is {model.get('type')!r}; only byte-level BPE is read.")
    for owner, key in (
        (data, "normalizer"),
        (model, "continuing_subword_prefix"),
        (model, "end_of_word_suffix"),
        (model, "ignore_merges"),
    ):
        if owner.get(key):
            raise TokenizerError(f"it sets {key!r}, which is not supported.")
    _check_pre_tokenizer(data.get("pre_tokenizer"))
    tokens = _checked_tokens(model.get("vocab"))
    return tokens, _checked_merges(model.get("merges"), set(tokens)), data["pre_tokenizer"]


def _checked_tokens(vocab: object) -> list[str]:
    """The tokens in the order of their ids."""
    if not isinstance(vocab, dict) or not all(type(index) is int for index in vocab.values()):
        raise TokenizerError("it has no vocabulary.")
    for index, name in enumerate(SPECIAL):
        if vocab.get(name) != index:
            found = f"has id {vocab[name]}" if name in vocab else "is missing"
            raise TokenizerError(
                f"{name} {found}; {', '.join(SPECIAL)} must have the ids 0, 1, 2, 3. "
                "Make a tokenizer with `mttrain tokenize`."
            )
    tokens: list[str] = sorted(vocab, key=vocab.__getitem__)
    if [vocab[token] for token in tokens] != list(range(len(tokens))):
        raise TokenizerError("the ids of its vocabulary are not 0, 1, 2, ... without a gap.")
    missing = len(_ALPHABET.keys() - vocab.keys())
    if missing:
        raise TokenizerError(f"{missing} of the 256 bytes are not in its vocabulary.")
    for token in tokens[len(SPECIAL) :]:
        if not token or not _ALPHABET.keys() >= set(token):
            raise TokenizerError(f"its entry {token[:40]!r} is not made of byte-level characters.")
    return tokens


def _checked_merges(merges: object, tokens: set[str]) -> list[list[str]]:
    """The merges as pairs; older files write a pair as one string with a space."""
    if not isinstance(merges, list):
        raise TokenizerError("it has no list of merges.")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    for number, pair in enumerate(pairs, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not {*pair, "".join(pair)} <= tokens:
            raise TokenizerError(f"merge {number} does not fit its vocabulary.")
        if "".join(pair) in SPECIAL:
            raise TokenizerError(f"merge {number} lets text become {''.join(pair)}.")
    return pairs


def _check_pre_tokenizer(data: object) -> None:
    """Text must reach the bytes whole: only splits that keep every character, then bytes."""
    nested = isinstance(data, dict) and data.get("type") == "Sequence"
    steps = data.get("pretokenizers") if nested and isinstance(data, dict) else [data]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise TokenizerError("it is not byte-level: it has no ByteLevel pre-tokenizer.")
    kinds = [step.get("type") for step in steps]
    if kinds.count("ByteLevel") != 1 or kinds[-1] != "ByteLevel":
        raise TokenizerError("it is not byte-level: its pre-tokenizer must end with ByteLevel.")
    if steps[-1].get("add_prefix_space", True):
        raise TokenizerError("it adds a space before each text (add_prefix_space).")
    for step in steps[:-1]:
        if step.get("type") not in ("Split", "Digits") or step.get("behavior") == "Removed":
            raise TokenizerError(f"its pre-tokenizer {step.get('type')!r} is not supported.")


# ---- learning ---------------------------------------------------------------------------------


def train_tokenizer(
    lines: Iterable[str],
    *,
    vocab_size: int,
    level: Literal["subword", "character"] = "subword",
    tags: Sequence[str] = (),
) -> Tokenizer:
    """Learn at most `vocab_size` tokens (fewer when the text gives no more) from lines of text.

    tags: names of tags, each an entry more besides what is learned, and counted in `vocab_size`.
    The same lines give the same tokenizer, whatever the hash seed and the number of threads: pairs
    of equal frequency are merged in the order of their ids. A line end that is still on a line is
    dropped. Raises ConfigError below 260 (4 special tokens and 256 bytes) and one for each tag,
    DataError without text.
    """
    names = list(dict.fromkeys(tags))
    if vocab_size < MIN_VOCAB_SIZE + len(names):
        ours = "4 special tokens"
        if names:
            ours += f", {len(names)} tags" if len(names) > 1 else ", a tag"
        raise ConfigError(
            f"tokenizer.vocab_size is {vocab_size}, but {ours} and 256 bytes are in every "
            f"vocabulary; give at least {MIN_VOCAB_SIZE + len(names)}."
        )
    source = (line.removesuffix("\n").removesuffix("\r") for line in lines)
    text = filter(None, source)
    first = next(text, None)
    if first is None:
        raise DataError("There is no text to learn a tokenizer from: no lines, or only empty ones.")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = _built(_LEVELS[level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[*SPECIAL, *map(tag_token, names)],
        initial_alphabet=sorted(_ALPHABET),
        show_progress=False,
    )
    inner.train_from_iterator(in_blocks(itertools.chain((first,), text), BLOCK), trainer)
    model = json.loads(inner.to_str())["model"]
    tokens = _checked_tokens(model["vocab"])
    return Tokenizer(tokens, _checked_merges(model["merges"], set(tokens)), _LEVELS[level])


def _built(data: dict[str, Any]) -> Any:
    """The library's object for a two-step pre-tokenizer of ours."""
    split, _ = data["pretokenizers"]
    pattern = tokenizers.Regex(split["pattern"]["Regex"])
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
