"""Draws sensible noun phrases, times, places and whole clauses from the lexicon.

All chance comes from one `random.Random`; every list drawn from is in the order of its table, so
that the same seed gives the same corpus whatever the hash seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from demo_grammar import NOTHING, NP, Clause, contracted, np_english, np_german, person
from demo_lexicon import (
    NUMBERS,
    TITLED,
    Adjective,
    Name,
    Noun,
    read_adjectives,
    read_names,
    read_nouns,
)
from demo_verbs import FREQUENCIES, Phrase, Verb, read_places, read_times, read_verbs

T = TypeVar("T")

# The first matching tag decides with which determiners a noun is drawn; `num` is two to four.
DETERMINERS = (
    ("language", "bare"),
    ("music", "bare"),
    ("money", "bare poss"),
    ("foodmass", "bare bare bare def"),
    ("spread", "bare bare def"),
    ("drink", "bare bare bare def"),
    ("kin", "poss poss poss poss owner"),
    ("kinoff", "def def this indef"),
    ("baby", "def"),
    ("prof", "def def indef this"),
    ("someone", "def def indef this"),
    ("pair", "poss def indefs this"),
    ("pet", "def def indef poss this owner"),
    ("animal", "def indef this num"),
    ("fruit", "indef indef def num indefs"),
    ("vegetable", "indef def num indefs indefs"),
    ("food", "indef indef def num"),
    ("weekend", "def"),
    ("light", "def"),
    ("part", "def def this"),
    ("room", "def def poss this"),
    ("public", "def"),
    ("bill", "def def this poss"),
    ("event", "def def this poss"),
    ("place", "this this def"),
    ("way", "this def"),
    ("abstract", "def def this indef"),
    ("public_place", "def def this"),
    ("building", "def def this"),
    ("own", "poss poss def indef this owner"),
    ("", "def def indef indef poss this num owner"),
)
# Verbs that want other determiners than the noun would be drawn with.
VERB_DETERMINERS = {
    "have": "indef indef num",
    "forget": "poss poss def",
    "lose": "poss poss def",
    "look for": "poss poss def",
    "find": "poss def def",
    "need": "indef indef num poss",
    "buy": "indef indef indefs def num",
    "bake": "indef indef def",
    "order": "indef indef num",
    "turn on": "def def this poss",
    "turn off": "def def this poss",
    "put on": "poss def indef this",
    "take off": "poss poss def",
    "wear": "indef indef poss this",
    "write": "indef indef num",
    "photograph": "def this indef",
    "paint": "indef def num",
    "take": "def",
    "dream": "indef poss",
    "bring along": "indef poss",
}

# Nouns that are drawn in the plural without a number.
PLURALS = frozenset(
    [
        "someone",
        "prof",
        "animal",
        "food",
        "pair",
        "read",
        "vessel",
        "plant",
        "art",
        "song",
        "private",
    ]
)
PRESENT_ONLY = {"know", "belong to", "speak", "love", "have"}
PUNCTUAL = {
    "lose", "miss", "forget", "find", "fall asleep", "wake up", "arrive", "take", "throw", "order",
    "follow", "come back", "come along", "hurry", "lend", "ask", "answer", "thank", "stay",
    "look forward",
}  # fmt: skip
HABITUAL = {
    "eat", "drink", "read", "write", "call", "pick", "help", "sing", "cook", "bake", "clean",
    "feed", "swim", "work", "get up", "watch TV", "shop", "travel", "go", "play", "talk", "dance",
    "run", "drive", "invite", "visit", "tidy", "wait", "listen to", "learn", "wash", "turn",
    "dream", "think",
}  # fmt: skip
# Drawn more often, since little else is said of food and drink.
COMMON = {"eat", "drink", "order"}
YEARLY = {"travel", "move", "learn", "fly", "buy", "sell", "visit"}
CLOCK = {"get up", "arrive", "come back", "pick", "call", "go", "fall asleep", "wake up", "meet"}
MANNERS = {
    "sing": (Phrase("loudly", "laut"), Phrase("quietly", "leise")),
    "laugh": (Phrase("loudly", "laut"),),
    "talk": (Phrase("quietly", "leise"), Phrase("loudly", "laut")),
    "read": (Phrase("alone", "allein"), Phrase("slowly", "langsam")),
    "run": (Phrase("quickly", "schnell"), Phrase("slowly", "langsam")),
    "swim": (Phrase("well", "gut"), Phrase("slowly", "langsam"), Phrase("alone", "allein")),
    "dance": (Phrase("well", "gut"), Phrase("alone", "allein")),
    "sleep": (Phrase("well", "gut"), Phrase("badly", "schlecht")),
    "open": (Phrase("carefully", "vorsichtig"), Phrase("slowly", "langsam")),
    "close": (Phrase("quietly", "leise"), Phrase("carefully", "vorsichtig")),
    "carry": (Phrase("carefully", "vorsichtig"),),
    "wash": (Phrase("carefully", "vorsichtig"),),
    "travel": (
        Phrase("by train", "mit dem Zug"),
        Phrase("by bus", "mit dem Bus"),
        Phrase("alone", "allein"),
    ),
    "go": (Phrase("on foot", "zu Fuß"), Phrase("alone", "allein"), Phrase("slowly", "langsam")),
    "live": (Phrase("alone", "allein"),),
    "work": (Phrase("alone", "allein"), Phrase("slowly", "langsam")),
}
# Where things lie and stand: English and German preposition, its verbs, its nouns.
SPOTS = (
    ("on", "auf", "put stand", "table shelf desk"),
    ("on", "auf", "put stand lay lie", "table shelf desk"),
    ("on", "auf", "lay lie", "chair bed sofa carpet"),
    ("in", "in", "put stand lay lie", "cupboard"),
    ("under", "unter", "lie", "table bed chair sofa"),
    ("next to", "neben", "put stand lie lay", "lamp bed radio television"),
    ("in front of", "vor", "lie", "door bed"),
    ("behind", "hinter", "lie", "door sofa"),
    ("on", "auf", "sit", "chair sofa bed"),
)


@dataclass(frozen=True)
class Spot:
    """A place by a piece of furniture, as a direction and as a position."""

    to: Phrase
    at: Phrase


class Sampler:
    """Draws the building blocks of the patterns."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nouns = read_nouns()
        self.adjectives = tuple(read_adjectives().values())
        self.names = read_names()
        self.verbs = read_verbs()
        self.places = read_places()
        self.times = read_times()
        self.manners = MANNERS
        self.favoured: tuple[Verb | Noun, ...] = ()
        self._verbs_with: dict[str, list[Verb]] = {}
        self._nouns_with: dict[frozenset[str], list[Noun]] = {}

    def pick(self, items: Sequence[T]) -> T:
        """One of `items`; mostly a favoured one where there is one among them."""
        for favourite in self.favoured:
            if favourite in items and self.chance(0.8):
                return favourite  # type: ignore[return-value]
        return items[int(self.rng.random() * len(items))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def choose(self, words: str) -> str:
        """One of the words of a string."""
        return self.pick(words.split())

    # --- noun phrases

    def nouns_with(self, tags: frozenset[str]) -> list[Noun]:
        """The nouns that carry any of `tags`, in the order of the table."""
        if tags not in self._nouns_with:
            self._nouns_with[tags] = [n for n in self.nouns.values() if n.tags & tags]
        return self._nouns_with[tags]

    def adjective(self, noun: Noun) -> Adjective | None:
        """An adjective that goes with the noun, where there is one."""
        fitting = [adj for adj in self.adjectives if adj.tags & noun.tags]
        return self.pick(fitting) if fitting else None

    def name(self, titled: bool = True) -> NP:
        """A first name, or sometimes Mr or Mrs and a surname."""
        names: Sequence[Name] = TITLED if titled and self.chance(0.15) else self.names
        return NP(name=self.pick(names))

    def owner(self) -> str:
        """A first name with the English possessive."""
        return self.pick(self.names).en + "'s"

    def noun_np(self, noun: Noun, determiners: str = "", adjective: float = 0.25) -> NP:
        """A phrase around a noun, with a determiner that suits it and perhaps an adjective."""
        options = determiners or next(d for tag, d in DETERMINERS if not tag or tag in noun.tags)
        det = self.choose(options)
        if noun.en_pl == "-" and (det in ("indef", "indefs", "num") or "language" in noun.tags):
            det = "bare"
        if "weekend" in noun.tags:
            det = "def"
        if det in ("indefs", "num") and not noun.tags & (PLURALS | {"many"}):
            det = "indef"
        plural = "pair" in noun.tags
        if det == "num":
            det, plural = str(self.pick([2, 2, 2, 3, 3, 4])), True
        elif det == "indefs":
            det, plural = "indef", True
        elif det == "poss":
            det = self.choose("my my your his her our their")
        elif det == "owner":
            det = self.owner()
        elif det in ("def", "this") and noun.en_pl != "-" and not noun.tags & {"part", "kin"}:
            plural = plural or bool(noun.tags & PLURALS and self.chance(0.2))
        if "many" in noun.tags and det in ("my", "your", "his", "her", "our", "their"):
            plural = self.chance(0.15)
        adj = self.adjective(noun) if self.chance(adjective) else None
        if noun.tags & {"kin", "language"} or (plural and det == "indef" and self.chance(0.5)):
            adj = None
        return NP(det, noun, adj, plural)

    def subject(self, tags: frozenset[str]) -> NP:
        """A subject of the tags: a pronoun or name for people, otherwise a noun."""
        human = tags & {"person", "adult", "young"}
        if human and self.chance(0.45):
            return person(self.choose("1s 1s 2s 2s 3sm 3sm 3sf 3sf 1p 3p"))
        if human and self.chance(0.5):
            return self.name()
        noun = self.pick(self.nouns_with(tags))
        usual = "def def def def this indef" if noun.tags & {"prof", "someone", "kinoff"} else ""
        return self.noun_np(noun, usual, adjective=0.15)

    def somebody(self) -> NP:
        """A person whom he or she can take up; a child is es in German and neither in English."""
        subj = self.subject(frozenset({"person"}))
        return subj if subj.noun is None or subj.noun.en != "child" else self.name()

    def other_person(self, subj: NP) -> NP:
        """An object pronoun for somebody who cannot be the subject."""
        codes = [code for code in ("1s", "2s", "3sm", "3sf", "1p", "3p") if code != subj.pronoun]
        if subj.pronoun in ("1s", "1p"):
            codes = ["2s", "3sm", "3sf", "3p"]
        elif subj.agreement == "3s":
            codes = ["1s", "2s", "1p", "3p", "3sf" if subj.gender == "m" else "3sm"]
        elif not subj.pronoun or subj.pronoun == "3p":
            codes = ["1s", "2s", "1p", "3sm", "3sf"]
        return person(self.pick(codes))

    def thing(self, verb: Verb, subj: NP, adjective: float = 0.25) -> NP:
        """An object for the verb."""
        nouns = self.nouns_with(verb.objects)
        human = "name" in verb.objects
        if human and self.chance(0.25):
            return self.other_person(subj)
        if human and self.chance(0.3):
            name = self.name()
            return self.other_person(subj) if name.name == subj.name else name
        noun = self.pick(nouns)
        if subj.noun == noun:
            noun = self.pick([other for other in nouns if other != noun])
        special = VERB_DETERMINERS.get(f"{verb.en} {verb.particle}".strip(), "")
        if "kin" in noun.tags and verb.en != "have":
            special = ""
        if verb.en in ("paint", "feed", "photograph", "cook", "bake", "wash", "prepare"):
            adjective = 0.1
        return self.noun_np(noun, special, adjective)

    # --- times and places

    def clock(self) -> Phrase:
        """A clock time without its preposition."""
        hour = self.rng.randint(1, 11)
        spoken, german = ("one", "eins") if hour == 1 else NUMBERS[hour]
        following, german_following = NUMBERS[hour + 1]
        kind = self.pick(("full", "full", "half", "half", "past", "to", "ten past", "ten to"))
        if kind == "full":
            return Phrase(
                f"{spoken} o'clock", f"{german.removesuffix('s') if hour == 1 else german} Uhr"
            )
        return {
            "half": Phrase(f"half past {spoken}", f"halb {german_following}"),
            "past": Phrase(f"a quarter past {spoken}", f"Viertel nach {german}"),
            "to": Phrase(f"a quarter to {following}", f"Viertel vor {german_following}"),
            "ten past": Phrase(f"ten past {spoken}", f"zehn nach {german}"),
            "ten to": Phrase(f"ten to {following}", f"zehn vor {german_following}"),
        }[kind]

    def at_clock(self) -> Phrase:
        """At a clock time."""
        clock = self.clock()
        return Phrase(f"at {clock.en}", f"um {clock.de}")

    def time(self, tense: str, verb: Verb | None = None) -> Phrase:
        """A time that goes with the tense, and with the verb where one is given."""
        if verb and verb.en in CLOCK and tense != "prog" and self.chance(0.5):
            return self.at_clock()
        if verb and verb.en in ("get up", "wake up", "fall asleep"):
            return self.at_clock()
        yearly = verb is not None and verb.en in YEARLY
        return self.pick([time for time in self.times[tense] if yearly or "year" not in time.en])

    def place(self, verb: Verb) -> Phrase:
        """Where the verb happens, NOTHING for a verb that is not asked where."""
        groups = {flag[3:] for flag in verb.flags if flag.startswith("at=")}
        fitting = [place.at for place in self.places if place.groups & groups]
        return self.pick(fitting) if fitting else NOTHING

    def goal(self, verb: Verb) -> Phrase:
        """Where the verb leads, NOTHING for a verb that does not move."""
        groups = {flag[3:] for flag in verb.flags if flag.startswith("to=")}
        fitting = [
            place.to for place in self.places if place.groups & groups and place.to.en != "-"
        ]
        return self.pick(fitting) if fitting else NOTHING

    def spot(self, verb: str) -> Spot:
        """A place by a piece of furniture that goes with the verb."""
        en, de, _, nouns = self.pick([spot for spot in SPOTS if verb in spot[2].split()])
        np = NP("def", self.nouns[self.choose(nouns)])
        english = f"{en} {np_english(np)}"
        return Spot(
            Phrase(english, contracted(de, np_german(np, "a"))),
            Phrase(english, contracted(de, np_german(np, "d"))),
        )

    def seat(self, subj: NP) -> Phrase:
        """What to sit down on; a chair is for one."""
        spot = self.spot("sit").to
        while subj.agreement == "" and "chair" in spot.en:
            spot = self.spot("sit").to
        return spot

    # --- clauses

    def verb(self, frames: str) -> Verb:
        """A verb with one of the frames."""
        if frames not in self._verbs_with:
            wanted = [v for v in self.verbs.values() if v.frame in frames.split()]
            common = [v for v in wanted if v.en in COMMON]
            self._verbs_with[frames] = [*wanted, *common, *common, *common]
        return self.pick(self._verbs_with[frames])

    def one_of(self, names: str) -> Verb:
        """One of the verbs whose keys stand between the commas."""
        return self.verbs[self.pick(names.split(","))]

    def tense(self, verb: Verb, subj: NP) -> str:
        """A tense that the verb can take and that English spells unmistakably."""
        tense = self.choose("pres pres pres prog prog past past past past perf fut fut")
        if verb.en in PRESENT_ONLY or f"{verb.en} {verb.particle}" in PRESENT_ONLY:
            return "pres"
        if tense == "prog" and ("stative" in verb.flags or verb.en in PUNCTUAL):
            tense = "past"
        if tense == "pres" and verb.en in PUNCTUAL:
            tense = "past"
        # "I read the book." might be either tense; "he reads" and "he read" may not.
        if verb.past == verb.en and subj.agreement != "3s" and tense in ("pres", "past"):
            tense = "perf"
        if tense == "perf" and ("need" in verb.flags or verb.en == "need"):
            tense = "past"
        return tense

    def objects(self, c: Clause, adjective: float = 0.25) -> Clause:
        """The clause with the objects and goals that its verb cannot do without."""
        verb = c.verb
        if verb.frame == "t":
            return replace(c, acc=self.thing(verb, c.subj, adjective))
        if verb.frame == "d":
            return replace(c, dat=self.thing(verb, c.subj, adjective))
        if verb.frame == "p":
            return replace(c, prep=self.thing(verb, c.subj, adjective))
        if verb.frame == "dt":
            noun = self.pick(self.nouns_with(verb.objects))
            return replace(c, dat=self.receiver(c.subj), acc=self.noun_np(noun, "", 0.15))
        if verb.frame == "spot":
            noun = self.pick(self.nouns_with(verb.objects))
            spot = (
                Phrase("on the wall", "an die Wand") if verb.en == "hang" else self.spot(verb.en).to
            )
            return replace(c, acc=self.noun_np(noun, "def poss indef", 0.2), pred=spot)
        if verb.frame == "seat":
            return replace(c, pred=self.seat(c.subj))
        if "need" in verb.flags:
            return replace(c, place=self.place(verb))
        return replace(c, pred=self.goal(verb))

    def receiver(self, subj: NP) -> NP:
        """The person something is given to."""
        if self.chance(0.4):
            return self.other_person(subj)
        if self.chance(0.4):
            name = self.name()
            return name if name.name != subj.name else self.other_person(subj)
        noun = self.pick(self.nouns_with(frozenset({"kin", "kinoff", "prof", "someone"})))
        return self.noun_np(noun, adjective=0.0) if noun != subj.noun else self.other_person(subj)

    def clause(self, frames: str = "t t t t d dt p i i spot seat", **fixed: object) -> Clause:
        """A clause with its objects, in a tense of its own unless `fixed` gives one."""
        verb = self.verb(self.choose(frames))
        subj = self.subject(verb.subjects)
        if verb.en == "belong to" and subj.noun:
            subj = self.noun_np(subj.noun, "def def this")
        c = self.objects(Clause(subj, verb, self.tense(verb, subj)))
        return replace(c, **fixed)  # type: ignore[arg-type]

    def adorned(self, c: Clause, time: bool = True) -> Clause:
        """The clause with a time, a frequency, a manner or a place that goes with it."""
        manners = self.manners.get(c.verb.en, ())
        if c.place is NOTHING and not c.neg and self.chance(0.4):
            c = replace(c, place=self.place(c.verb))
        elif manners and self.chance(0.5):
            c = replace(c, manner=self.pick(manners))
        if c.tense == "pres" and c.verb.en in ("get up", "wake up"):
            always = FREQUENCIES[1] if self.chance(0.5) else NOTHING
            return replace(c, time=self.at_clock(), freq=always)
        # One eats an apple every day, but the apple only once.
        once = c.verb.en in ("eat", "drink", "cook", "bake", "write") and c.acc and c.acc.definite
        habitual = c.verb.en in HABITUAL and not once
        if c.tense == "pres" and habitual and self.chance(0.5) and not c.neg:
            return replace(c, freq=self.pick(FREQUENCIES))
        if not time or c.tense == "perf" or c.verb.en == "live":
            return c
        if c.tense == "pres" and not habitual:
            return c
        return replace(c, time=self.time(c.tense, c.verb)) if self.chance(0.55) else c
