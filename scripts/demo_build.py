"""What the sentence patterns of the demo corpus are put together with: drafts and clauses."""

from __future__ import annotations

from dataclasses import dataclass

from demo_grammar import NOTHING, NP, Clause, english, german, person
from demo_verbs import Phrase, Verb


def _simple(english: str, german: str, aux: str, imperative: str) -> Verb:
    """A verb that the patterns use by name: it takes no drawn subject and no drawn object."""
    en, past, participle = english.split()
    de, third, de_participle = german.split()
    return Verb(
        en=en,
        particle="",
        past=past,
        participle=participle,
        de=de,
        prefix="",
        de_third=third,
        de_participle=de_participle,
        aux=aux,
        imperative=imperative,
        frame="",
        prep=NOTHING,
        prep_case="",
        subjects=frozenset(),
        objects=frozenset(),
        reflexive=False,
        flags=frozenset(),
    )


BE = _simple("be was been", "sein ist gewesen", "s", "sei")
RAIN = _simple("rain rained rained", "regnen regnet geregnet", "h", "regne")
TRY = _simple("try tried tried", "versuchen versucht versucht", "h", "versuch")
FORGET = _simple("forget forgot forgotten", "vergessen vergisst vergessen", "h", "vergiss")

# Adjectives that are not said with very or too.
ABSOLUTE = {
    "broken",
    "red",
    "blue",
    "green",
    "black",
    "white",
    "yellow",
    "clean",
    "empty",
    "cold",
    "new",
    # of the software domain
    "damaged",
    "encrypted",
    "hidden",
    "unknown",
    "public",
    "free",
    "available",
    "current",
    "wrong",
}
BECAUSE, THAT, IF, ALTHOUGH, WHETHER, WHILE = (
    Phrase("because", "weil"),
    Phrase("that", "dass"),
    Phrase("if", "wenn"),
    Phrase("although", "obwohl"),
    Phrase("whether", "ob"),
    Phrase("while", "während"),
)


@dataclass(frozen=True)
class Draft:
    """A drawn pair, with the (verb, noun) pairs that it joins."""

    en: str
    de: str
    joins: tuple[tuple[str, str], ...] = ()


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _joins(*clauses: Clause) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"{c.verb.en} {c.verb.particle}".strip(), noun) for c in clauses for noun in c.nouns()
    )


def draft(en: str, de: str, *clauses: Clause, end: str = ".") -> Draft:
    """A pair of sentences with capital and full stop."""
    return Draft(capital(en) + end, capital(de) + end, _joins(*clauses))


def main_clause(c: Clause, front: Phrase = NOTHING) -> Phrase:
    """A main clause in both languages, with `front` before the German verb."""
    return Phrase(english(c, front=front.en), german(c, front=front.de))


def sub_clause(c: Clause, conjunction: Phrase) -> Phrase:
    """A subordinate clause in both languages."""
    return Phrase(english(c, front=conjunction.en), german(c, order="final", front=conjunction.de))


def after_sub(sub: Phrase, c: Clause) -> Phrase:
    """A subordinate clause and then its main clause."""
    return Phrase(f"{sub.en}, {english(c)}", german(c, front=f"{sub.de},"))


def with_sub(c: Clause, sub: Phrase) -> Phrase:
    """A main clause and then a subordinate one, which German sets off with a comma."""
    return Phrase(f"{english(c)} {sub.en}", f"{german(c)}, {sub.de}")


def the_pronoun(np: NP) -> NP:
    """The pronoun that takes up a noun phrase: it is er, sie or es by the German noun."""
    if np.pronoun:
        return np
    if np.plural:
        return person("3p")
    if np.noun and "person" not in np.noun.tags:
        return person("3i" + np.gender)
    # A girl is she and sie, though the German noun is neuter.
    return person("3s" + np.gender.replace("n", "f"))


def pair(phrase: Phrase) -> tuple[str, str]:
    """Both languages of a phrase."""
    return phrase.en, phrase.de


def join(*phrases: Phrase, glue: str = " ") -> Phrase:
    """Phrases one after the other."""
    return Phrase(
        glue.join(p.en for p in phrases if p.en), glue.join(p.de for p in phrases if p.de)
    )


def be(subj: NP, predicate: Phrase, tense: str = "pres", neg: bool = False) -> Clause:
    """A clause with to be."""
    return Clause(subj, BE, tense, neg=neg, pred=predicate)
