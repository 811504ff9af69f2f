"""Write the English-German demo corpus from its hand-written lexicon and grammar.

    python scripts/make_demo_corpus.py            # writes data/demo
    python scripts/make_demo_corpus.py --check    # exits 1 if data/demo is not what this writes

Sentences are drawn pattern by pattern until there are enough different ones; some seconds in all.
The last 100 of the 500 test sentences join a verb and a noun of compositional.tsv; a train or valid
sentence never has both, in any form and anywhere in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo_build import Draft
from demo_complex import COMPLEX
from demo_grammar import ing, third_singular
from demo_lexicon import Noun
from demo_questions import FIXED, QUESTIONS
from demo_sampler import Sampler
from demo_statements import STATEMENTS
from demo_verbs import Verb

PATTERNS = STATEMENTS + QUESTIONS + COMPLEX
TRAIN, VALID, TEST, COMPOSITIONAL = 20000, 500, 500, 100
SPARE = 1.1  # how much more is drawn than is used
PER_PAIR = 4  # sentences of the compositional part for each held-out pair
DEFAULT_SEED = 1

# Verbs and nouns that go well together but meet in the compositional part of test only.
HELD_OUT = (
    ("read", "letter"), ("write", "poem"), ("buy", "lamp"), ("sell", "piano"), ("see", "bridge"),
    ("eat", "cake"), ("drink", "tea"), ("find", "ring"), ("visit", "museum"),
    ("need", "pencil"),
    ("open", "suitcase"), ("close", "window"), ("turn on", "radio"), ("turn off", "television"),
    ("call", "grandmother"), ("invite", "neighbour"), ("pick up", "guest"), ("wash", "shirt"),
    ("repair", "bicycle"), ("help", "farmer"), ("photograph", "horse"), ("look for", "camera"),
    ("tidy up", "cupboard"), ("wear", "hat"), ("have", "rabbit"),
)  # fmt: skip


def tokens(sentence: str) -> list[str]:
    """The words of a sentence, without punctuation."""
    return [word for word in (part.strip(".,?!") for part in sentence.split()) if word]


def verb_forms(verb: Verb) -> frozenset[str]:
    """Every English form of a verb, of a verb of two words its first."""
    forms = (verb.en, third_singular(verb.en), ing(verb.en), verb.past, verb.participle)
    return frozenset(form.split()[0] for form in forms)


def noun_forms(noun: Noun) -> frozenset[str]:
    """The English singular and, where there is one, the plural of a noun."""
    return frozenset({noun.en, noun.en_pl} - {"-"})


class HeldOut:
    """Knows the held-out pairs and finds them in drafts."""

    def __init__(self, sampler: Sampler) -> None:
        self.forms = {
            (verb, noun): (verb_forms(sampler.verbs[verb]), noun_forms(sampler.nouns[noun]))
            for verb, noun in HELD_OUT
        }

    def touches(self, sentence: str) -> bool:
        """Whether the words of a pair are anywhere in the sentence, joined or not."""
        words = {word.lower() for word in tokens(sentence)}
        return any(words & verbs and words & nouns for verbs, nouns in self.forms.values())

    def table(self) -> str:
        """The pairs with their forms, a line each, for whoever wants to check."""
        rows = ["verb\tnoun\tverb forms\tnoun forms"]
        for (verb, noun), forms in self.forms.items():
            rows.append("\t".join([verb, noun, *(" ".join(sorted(words)) for words in forms)]))
        return "\n".join(rows) + "\n"


class Corpus:
    """Collects different pairs and refuses an English sentence with two Germans."""

    def __init__(self, seed: int) -> None:
        self.sampler = Sampler(seed)
        self.held_out = HeldOut(self.sampler)
        self.german: dict[str, str] = {}
        self.plain: list[Draft] = []
        self.patterns = [pattern for weight, pattern in PATTERNS for _ in range(weight)]

    def draw(self) -> None:
        """Draw one sentence and keep it if it is new."""
        self.keep(self.sampler.pick(self.patterns)(self.sampler))

    def keep(self, draft: Draft) -> None:
        """File a new draft as plain or under the held-out pair that it joins."""
        if draft.en in self.german:
            assert self.german[draft.en] == draft.de, (draft.en, draft.de, self.german[draft.en])
            return
        self.german[draft.en] = draft.de
        if not self.held_out.touches(draft.en):
            self.plain.append(draft)

    def joining(self, pair: tuple[str, str], train: list[Draft]) -> list[Draft]:
        """Sentences of different patterns that join a held-out pair and use only words of train."""
        verb, noun = pair
        self.sampler.favoured = (self.sampler.verbs[verb], self.sampler.nouns[noun])
        words, germans = known_words(train), {draft.de for draft in train}
        found: dict[object, Draft] = {}
        while len(found) < PER_PAIR:
            pattern = self.sampler.pick(self.patterns)
            draft = pattern(self.sampler)
            if pair in draft.joins and draft.de not in germans and known_words([draft]) <= words:
                found.setdefault(pattern, draft)
        self.sampler.favoured = ()
        return list(found.values())


def known_words(drafts: list[Draft]) -> set[str]:
    """The words and marks of both languages, with a letter for the language."""
    words = set()
    for draft in drafts:
        for side, text in (("en", draft.en), ("de", draft.de)):
            words |= {f"{side} {word}" for word in tokens(text)}
    return words


def build(seed: int) -> dict[str, list[Draft]]:
    """Draw the whole corpus: train, valid and test, the compositional part last in test."""
    corpus = Corpus(seed)
    for phrase in FIXED:
        corpus.keep(Draft(phrase.en, phrase.de))
    while len(corpus.plain) < (TRAIN + VALID + TEST) * SPARE:
        corpus.draw()
    fixed, rest = corpus.plain[: len(FIXED)], corpus.plain[len(FIXED) :]
    corpus.sampler.rng.shuffle(rest)
    train, spare = [*fixed, *rest[: TRAIN - len(fixed)]], rest[TRAIN - len(fixed) :]
    corpus.sampler.rng.shuffle(train)
    compositional = [draft for pair in HELD_OUT for draft in corpus.joining(pair, train)]
    fresh = unseen(train, spare)
    usual = TEST - COMPOSITIONAL
    parts = {
        "train": train,
        "valid": fresh[usual : usual + VALID],
        "test": [*fresh[:usual], *compositional],
    }
    assert [len(part) for part in parts.values()] == [TRAIN, VALID, TEST]
    return parts


def unseen(train: list[Draft], drafts: list[Draft]) -> list[Draft]:
    """The drafts that are new in both languages and use only words of train."""
    words, germans = known_words(train), {draft.de for draft in train}
    fresh = [d for d in drafts if d.de not in germans and known_words([d]) <= words]
    return list({draft.de: draft for draft in fresh}.values())


def files(seed: int) -> dict[str, str]:
    """The names and the text of all files."""
    parts = build(seed)
    texts = {"compositional.tsv": HeldOut(Sampler(seed)).table()}
    for part, drafts in parts.items():
        texts[f"{part}.en"] = "".join(draft.en + "\n" for draft in drafts)
        texts[f"{part}.de"] = "".join(draft.de + "\n" for draft in drafts)
    for side in ("en", "de"):
        lines = texts[f"test.{side}"].splitlines(keepends=True)
        texts[f"test.compositional.{side}"] = "".join(lines[-COMPOSITIONAL:])
    return texts


def check(output: Path, texts: dict[str, str]) -> int:
    """Compare with what is there; the exit status."""
    different = [
        name
        for name, text in texts.items()
        if not (output / name).is_file() or (output / name).read_bytes() != text.encode()
    ]
    for name in different:
        print(f"{output / name} is not what this script writes; run it without --check.")
    return 1 if different else 0


def main() -> int:
    """Parse the arguments and write or check the files."""
    parser = argparse.ArgumentParser(description="Write the English-German demo corpus.")
    default = Path(__file__).resolve().parent.parent / "data" / "demo"
    parser.add_argument("--output", type=Path, default=default, help="folder of the files")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="seed of the draw")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    texts = files(arguments.seed)
    if arguments.check:
        return check(arguments.output, texts)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (arguments.output / name).write_bytes(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
