"""Write the English-German demo corpus from its hand-written lexicon and grammar.

    python scripts/make_demo_corpus.py            # writes data/demo
    python scripts/make_demo_corpus.py --check    # exits 1 if data/demo is not what this writes
    python scripts/make_demo_corpus.py --domain software --output data/software    # another domain

Sentences are drawn pattern by pattern until there are enough different ones; some seconds in all.
The last 100 of the 500 test sentences join a verb and a noun of compositional.tsv; a train or valid
sentence never has both, in any form and anywhere in it. A domain (`demo_software`) has other words
on another subject, for adapting a model that was trained on the demo corpus; it has no
compositional part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import demo_software
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
DOMAINS = {"software": (demo_software.SoftwareSampler, demo_software.PATTERNS)}
DOMAIN_PARTS = {"train": 2000, "valid": 200, "test": 300}
DOMAIN_SPARE = 1.3  # rare words of few sentences: more are drawn in vain
PER_PAIR = 4  # sentences of the compositional part for each held-out pair
DEFAULT_SEED = 1

Weighted = tuple[int, Callable[..., Draft]]

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

    def __init__(
        self, sampler: Sampler, patterns: Sequence[Weighted], held_out: HeldOut | None = None
    ) -> None:
        self.sampler = sampler
        self.held_out = held_out
        self.german: dict[str, str] = {}
        self.plain: list[Draft] = []
        self.patterns = [pattern for weight, pattern in patterns for _ in range(weight)]

    def draw(self) -> None:
        """Draw one sentence and keep it if it is new."""
        self.keep(self.sampler.pick(self.patterns)(self.sampler))

    def keep(self, draft: Draft) -> None:
        """File a new draft as plain or under the held-out pair that it joins."""
        if draft.en in self.german:
            assert self.german[draft.en] == draft.de, (draft.en, draft.de, self.german[draft.en])
            return
        self.german[draft.en] = draft.de
        if self.held_out is None or not self.held_out.touches(draft.en):
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
    sampler = Sampler(seed)
    corpus = Corpus(sampler, PATTERNS, HeldOut(sampler))
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


def build_domain(domain: str, seed: int) -> dict[str, list[Draft]]:
    """Draw the corpus of a domain: train, valid and test."""
    sampler_type, patterns = DOMAINS[domain]
    corpus = Corpus(sampler_type(seed), patterns)
    while len(corpus.plain) < sum(DOMAIN_PARTS.values()) * DOMAIN_SPARE:
        corpus.draw()
    corpus.sampler.rng.shuffle(corpus.plain)
    size = DOMAIN_PARTS["train"]
    train, fresh = corpus.plain[:size], unseen(corpus.plain[:size], corpus.plain[size:])
    held = DOMAIN_PARTS["valid"]
    parts = {
        "train": train,
        "valid": fresh[:held],
        "test": fresh[held : held + DOMAIN_PARTS["test"]],
    }
    assert {name: len(part) for name, part in parts.items()} == DOMAIN_PARTS
    return parts


def unseen(train: list[Draft], drafts: list[Draft]) -> list[Draft]:
    """The drafts that are new in both languages and use only words of train."""
    words, germans = known_words(train), {draft.de for draft in train}
    fresh = [d for d in drafts if d.de not in germans and known_words([d]) <= words]
    return list({draft.de: draft for draft in fresh}.values())


def lines(parts: dict[str, list[Draft]]) -> dict[str, str]:
    """The names and the text of the files of these parts."""
    texts = {}
    for part, drafts in parts.items():
        texts[f"{part}.en"] = "".join(draft.en + "\n" for draft in drafts)
        texts[f"{part}.de"] = "".join(draft.de + "\n" for draft in drafts)
    return texts


def files(seed: int) -> dict[str, str]:
    """The names and the text of all files of the demo corpus."""
    texts = {"compositional.tsv": HeldOut(Sampler(seed)).table(), **lines(build(seed))}
    for side in ("en", "de"):
        test = texts[f"test.{side}"].splitlines(keepends=True)
        texts[f"test.compositional.{side}"] = "".join(test[-COMPOSITIONAL:])
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
    data = Path(__file__).resolve().parent.parent / "data"
    parser.add_argument("--output", type=Path, help="folder of the files (data/demo)")
    parser.add_argument("--domain", choices=DOMAINS, help="another domain (data/NAME)")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="seed of the draw")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    domain = arguments.domain
    output = arguments.output or data / (domain or "demo")
    texts = lines(build_domain(domain, arguments.seed)) if domain else files(arguments.seed)
    if arguments.check:
        return check(output, texts)
    output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (output / name).write_bytes(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
