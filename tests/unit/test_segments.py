"""Source lines as rows of batches: cutting, batching, splitting."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mttrain.errors import DataError
from mttrain.segments import (
    PrefixCountError,
    TranslateOptions,
    batches,
    cut_ids,
    in_halves,
    numbered_lines,
    padded,
    sentence_pairs,
    split_sentences,
)
from mttrain.tokenizer import EOS_ID, PAD_ID, Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a b c . d e f !"] * 3, vocab_size=260)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """Words are tokens together with the space before them, and several ones without."""
    return train_tokenizer(["x house dog"] * 3, vocab_size=275)


@given(st.lists(st.integers(4, 99), max_size=30), st.integers(2, 40))
def test_cut_keeps_eos_and_the_exact_length(ids: list[int], limit: int) -> None:
    """D02, T14: cutting after EOS was added would lose it; what fits is not touched."""
    kept, shorter = cut_ids(ids, limit)
    assert kept[-1] == EOS_ID and kept[:-1] == ids[: limit - 1]
    assert shorter is (len(ids) + 1 > limit)
    assert len(kept) == min(len(ids) + 1, limit)
    assert cut_ids(ids, None) == ([*ids, EOS_ID], False)


@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(1, 200),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_batches_hold_everything_once(lengths: list[int], tokens: int, size: int | None) -> None:
    """D04, D05, D07: every line in exactly one batch; rows x longest within the budget, but for a
    line that is longer alone."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = list(batches(order, lengths, tokens=tokens, size=size))
    assert [index for batch in found for index in batch] == order
    for batch in found:
        assert batch
        if size is not None:
            assert len(batch) <= size
        else:
            longest = max(lengths[index] for index in batch)
            assert len(batch) * longest <= tokens or len(batch) == 1


def test_padding_is_at_the_end() -> None:
    table = padded([[5, 6, EOS_ID], [EOS_ID]], torch.device("cpu"))
    assert table.dtype == torch.int64
    assert table.tolist() == [[5, 6, EOS_ID], [EOS_ID, PAD_ID, PAD_ID]]


@pytest.mark.parametrize(
    "refusal",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        # What the CPU allocator says on Linux, and on Windows.
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
                     "allocate memory: you tried to allocate 9 bytes. Error code 12"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
    ids=["cuda", "python", "linux", "windows"],
)  # fmt: skip
def test_what_does_not_fit_is_halved(refusal: Exception) -> None:
    """S09: the CPU's allocator raises a bare RuntimeError, which was not taken for what it is; one
    item that does not fit alone is the user's to mend, other errors are not."""

    def work(items: Sequence[int]) -> list[int]:
        if sum(items) > 10:
            raise refusal
        return [item * item for item in items]

    def too_large(item: int) -> DataError:
        return DataError(f"{item} is too much")

    numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert in_halves(work, numbers, too_large) == [n * n for n in numbers]
    assert in_halves(work, [], too_large) == []
    with pytest.raises(DataError, match="11 is too much"):
        in_halves(work, [2, 11, 3], too_large)

    def broken(items: Sequence[int]) -> list[int]:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        in_halves(broken, numbers, too_large)


def test_a_beam_takes_its_share_of_the_budget() -> None:
    """Memory grows with the hypotheses, so the default budget counts each of them."""
    cpu = torch.device("cpu")
    assert TranslateOptions(beam=1).sentence_tokens(cpu) == 3072
    assert TranslateOptions(beam=4).sentence_tokens(cpu) == 2048
    assert TranslateOptions(beam=4, batch_tokens=400).sentence_tokens(cpu) == 100
    assert TranslateOptions(beam=4, nbest=2, sample=True).sentence_tokens(cpu) == 3072


def test_windows() -> None:
    """S18: a batch of one reads one line ahead; others read more than they need, to sort."""
    assert TranslateOptions(batch_size=1).lines_ahead() == 1
    assert TranslateOptions(batch_size=8).lines_ahead() > 100
    assert TranslateOptions(batch_size=8, window=5).lines_ahead() == 5


def test_lines_are_numbered_from_one() -> None:
    assert [(line.number, line.text) for line in numbered_lines(["a", "b"], None)] == [
        (1, "a"),
        (2, "b"),
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two! Three? Four…  Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("3.14 is pi. e.g.this stays", ["3.14 is pi.", "e.g.this stays"]),
        ("一。「二！」三？！四", ["一。", "「二！」", "三？！", "四"]),
        ("no end at all", ["no end at all"]),
        ("  spaces around.  ", ["  spaces around.  "]),
        ("Mr. A met Dr. B. He left.", ["Mr. A met Dr. B. He left."]),
        ("Am 3. Mai, z. B. mit J. S. Bach. Gut.", ["Am 3. Mai, z. B. mit J. S. Bach.", "Gut."]),
        ("Nr. 7, bzw. Nr. 8 usw. sind da. Ende!", ["Nr. 7, bzw. Nr. 8 usw. sind da.", "Ende!"]),
        ('(Vgl. St. Pauli etc.) Ja? "Prof." Nein.', ["(Vgl. St. Pauli etc.) Ja?", '"Prof." Nein.']),
        ("Last. First... Third.", ["Last.", "First...", "Third."]),
        ("In 1990! Then 2000? Now.", ["In 1990!", "Then 2000?", "Now."]),
    ],
)
def test_sentence_ends(tokenizer: Tokenizer, text: str, parts: list[str]) -> None:
    """Split at sentence ends only, closing quotes kept with their sentence; one part is the text
    itself. Lines were torn after "Mr.", "3." and "z. B."."""
    found = split_sentences(text, tokenizer, 1)
    assert [tokenizer.decode(ids) for ids in found] == parts


@given(
    st.lists(st.sampled_from(["house dog.", "house!", "dog house x house dog?"]), min_size=1),
    st.integers(1, 60),
)
def test_parts_are_packed(words: Tokenizer, parts: list[str], longest: int) -> None:
    """Nothing lost, in order; no part is longer than wished unless it is one sentence, not even
    where its first word is longer without the space before it; and two neighbours never fit into
    one."""
    assert len(words.encode(" house")) < len(words.encode("house"))
    text = " ".join(parts)
    found = split_sentences(text, words, longest)
    texts = [words.decode(ids) for ids in found]
    assert " ".join(texts) == text
    for ids, part in zip(found, texts, strict=True):
        assert len(ids) <= longest or part in parts
    for one, other in itertools.pairwise(texts):
        first = next(part for part in parts if other.startswith(part))
        whole = words.encode(f"{one} {first}")
        assert len(whole) > longest


def test_one_string_is_no_list_of_lines() -> None:
    """`translate("a sentence")` translated letter by letter, `score(("a", "b"))` letter pairs."""
    for lines, prefixes in (("abc", None), (["abc"], "d")):
        with pytest.raises(TypeError, match="not one string"):
            list(numbered_lines(lines, prefixes))
    for pairs in ("ab", ("ab", "cd")):
        with pytest.raises(TypeError, match="list of"):
            list(sentence_pairs(pairs))  # type: ignore[arg-type]
    assert list(sentence_pairs([("ab", "cd")])) == [("ab", "cd")]


def test_counts_of_prefixes_are_in_grammar() -> None:
    """The error said "There are only 1 prefixes"."""
    with pytest.raises(PrefixCountError, match=r"^Only 1 prefix for 2 or more source lines"):
        list(numbered_lines(["a", "b"], ["c"]))
    with pytest.raises(PrefixCountError, match=r"^More prefixes than the 1 source line;"):
        list(numbered_lines(["a"], ["c", "d"]))
