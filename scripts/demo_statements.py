"""Patterns of plain statements: tenses, word order, negation, modals, objects, to be."""

from __future__ import annotations

from dataclasses import replace

from demo_build import ABSOLUTE, Draft, be, draft, main_clause, pair
from demo_grammar import (
    NOTHING,
    NP,
    Clause,
    english,
    german,
    negated,
    np_english,
    np_german,
    person,
)
from demo_lexicon import NUMBERS, PET_NAMES, Noun
from demo_sampler import HABITUAL, PRESENT_ONLY, Sampler
from demo_verbs import FREQUENCIES, Phrase


def statement(s: Sampler) -> Draft:
    """Main clause with an adverbial: Anna hat gestern einen Brief geschrieben."""
    c = s.adorned(s.clause())
    return draft(*pair(main_clause(c)), c)


def fronted(s: Sampler) -> Draft:
    """Time first, verb second: Morgen wird Peter die Tür aufmachen."""
    c = s.adorned(s.clause(), time=False)
    while c.verb.en in PRESENT_ONLY:
        c = s.adorned(s.clause(), time=False)
    if c.tense == "perf" or (c.tense == "pres" and c.verb.en not in HABITUAL):
        c = replace(c, tense="fut", freq=NOTHING)
    if c.verb.en in ("eat", "drink", "cook", "bake") and c.acc and c.acc.definite:
        c = replace(c, tense="fut" if c.tense == "pres" else c.tense)
    time = s.time(c.tense, c.verb)
    return draft(*pair(main_clause(replace(c, freq=NOTHING), time)), c)


def moving(s: Sampler) -> Draft:
    """Motion, place and rest without an object: Sie fährt morgen mit dem Zug nach Wien."""
    verb = s.pick([v for v in s.verbs.values() if v.frame == "i"])
    subj = s.subject(verb.subjects)
    c = s.adorned(s.objects(Clause(subj, verb, s.tense(verb, subj))))
    return draft(*pair(main_clause(c)), c)


def negation(s: Sampler) -> Draft:
    """nicht and kein: Ich habe keinen Hund. Er kommt heute nicht mit."""
    c = s.clause("t t t d p i")
    while c.verb.en == "belong to":
        c = s.clause("t t t d p i")
    if c.tense == "perf":
        c = replace(c, already=s.chance(0.6))
    c = negated(c)
    if not c.already and c.tense in ("past", "fut") and s.chance(0.5):
        c = replace(c, time=s.time(c.tense, c.verb))
    return draft(*pair(main_clause(c)), c)


def already(s: Sampler) -> Draft:
    """Present perfect with schon: Wir haben den Film schon gesehen."""
    c = s.clause("t t d i")
    while (
        c.verb.en in ("live", "stay", "have", "know", "love", "need", "cry", "belong to")
        or c.tense == "pres"
    ):
        c = s.clause("t t d i")
    if c.acc and not c.acc.definite:
        c = replace(c, acc=replace(c.acc, det="def", adj=None))
    c = replace(c, tense="perf", already=True)
    if s.chance(0.3):
        return draft(english(c, "question"), german(c, "question"), c, end="?")
    return draft(*pair(main_clause(c)), c)


def modal(s: Sampler) -> Draft:
    """Modal verbs: Du musst das Fenster zumachen. Er wollte den Bus nehmen."""
    c = _modal_clause(s)
    sensible = c.subj.pronoun != "1s" or c.modal in ("may", "should")
    if s.chance(0.2) and sensible and not (c.neg and c.modal == "must"):
        return draft(english(c, "question"), german(c, "question"), c, end="?")
    return draft(*pair(main_clause(c)), c)


# What nobody wants, may or must do.
UNWILLED = {
    "have", "love", "know", "belong to", "need", "lose", "look forward", "remember", "fall asleep",
    "wake up", "cry", "dream", "understand", "arrive", "miss", "follow", "find",
}  # fmt: skip


def _modal_clause(s: Sampler) -> Clause:
    name = s.pick(
        ("can", "can", "must", "must", "should", "may", "want", "want", "have", "would like")
    )
    c = s.clause("t t t d dt p i")
    while c.verb.en in UNWILLED or not ({"person", "adult", "young"} & c.verb.subjects):
        c = s.clause("t t t d dt p i")
    past = name in ("can", "want", "have") and s.chance(0.3)
    c = replace(c, modal=name, tense="past" if past else "pres")
    if s.chance(0.25) and not (c.acc and not c.acc.definite) and name != "would like":
        c = c if name == "may" else negated(c)
    if s.chance(0.45):
        c = replace(c, time=s.time("past" if past else "fut", c.verb))
    return c


def giving(s: Sampler) -> Draft:
    """Two objects, a pronoun first: Ich zeige ihr das Bild. Er hat es dem Kind gegeben."""
    c = s.adorned(s.clause("dt"), time=s.chance(0.5))
    return draft(*pair(main_clause(c)), c)


def dative(s: Sampler) -> Draft:
    """Verbs with the dative: Das Auto gehört meinem Bruder. Sie hilft ihm."""
    if s.chance(0.5):
        c = s.adorned(s.clause("d"))
        return draft(*pair(main_clause(c)), c)
    verb = s.verbs["belong to"]
    noun = s.pick(
        s.nouns_with(
            frozenset(["private", "home", "small", "own", "furn", "dev", "inst", "pet", "farm"])
        )
    )
    owner = s.thing(verb, person("3p"))
    while owner.pronoun.startswith("3"):
        owner = s.thing(verb, person("3p"))
    c = Clause(s.noun_np(noun, "def def this", 0.5), verb, dat=owner)
    return draft(*pair(main_clause(c)), c)


def liking(s: Sampler) -> Draft:
    """Turned round: Anna likes the dress. Das Kleid gefällt Anna."""
    tags = frozenset(
        ["cloth", "art", "home", "place", "song", "show", "building", "pretty", "private"]
    )
    thing = s.noun_np(s.pick(s.nouns_with(tags)), "def this", 0.4)
    fan = s.subject(frozenset({"person"}))
    neg = s.chance(0.2)
    verb = "do not like" if neg else "like"
    if fan.agreement == "3s":
        verb = "does not like" if neg else "likes"
    finite = "gefallen" if thing.plural else "gefällt"
    en = f"{np_english(fan, True)} {verb} {np_english(thing)}"
    de = [np_german(thing, "n"), finite, np_german(fan, "d"), "nicht" if neg else ""]
    return draft(en, " ".join(filter(None, de)))


LIKED = {
    "read", "write", "eat", "drink", "learn", "sing", "cook", "bake", "paint", "visit", "wear",
    "photograph", "swim", "dance", "work", "watch TV", "shop", "travel", "go", "rest",
}  # fmt: skip


def gern(s: Sampler) -> Draft:
    """Like to is gern: Sie trinkt gern Tee. Ich schwimme gern im See."""
    c = s.clause("t i")
    while c.verb.en not in LIKED or (c.acc and c.acc.noun and c.acc.det.isdigit()):
        c = s.clause("t i")
    if c.acc and c.acc.noun and not c.acc.noun.tags & {"kin"}:
        mass = c.acc.noun.en_pl == "-"
        np = NP("bare" if mass else "indef", c.acc.noun, None, not mass)
        c = replace(c, acc=np)
    c = replace(c, tense="pres", gern=True)
    if c.pred is NOTHING and s.chance(0.5):
        c = replace(c, place=s.place(c.verb))
    return draft(*pair(main_clause(c)), c)


def playing(s: Sampler) -> Draft:
    """Instruments and games go without an article: Er spielt Klavier."""
    piece = s.pick((
        Phrase("the guitar", "Gitarre"), Phrase("the piano", "Klavier"),
        Phrase("football", "Fußball"), Phrase("tennis", "Tennis"), Phrase("chess", "Schach"),
        Phrase("cards", "Karten"),
    ))  # fmt: skip
    subj = s.subject(frozenset({"person"}))
    c = Clause(subj, s.verbs["play"], s.choose("pres pres prog past fut"), pred=piece)
    if c.tense == "pres" and s.chance(0.4):
        c = replace(c, gern=True)
    elif c.tense == "pres" and s.chance(0.5):
        c = replace(c, freq=s.pick(FREQUENCIES))
    elif s.chance(0.6):
        c = replace(c, time=s.time(c.tense))
    return draft(*pair(main_clause(c)), c)


# --- to be


def _state(s: Sampler, subj: NP) -> Phrase:
    """An adjective that can be said of the subject."""
    tags = {"person", "state"} if subj.noun is None else subj.noun.tags
    if tags & {"person"}:
        tags = tags | {"state"}
    fitting = [adj for adj in s.adjectives if adj.tags & tags]
    adj = s.pick(fitting)
    if adj.en not in ABSOLUTE and s.chance(0.3):
        return Phrase(f"very {adj.en}", f"sehr {adj.de}")
    return Phrase(adj.en, adj.de)


def describable(s: Sampler) -> Noun:
    """A thing that some adjective goes with."""
    tags = frozenset().union(*(adj.tags for adj in s.adjectives)) - {"person", "adult"}
    return s.pick([noun for noun in s.nouns_with(tags) if not noun.tags & {"person", "kin"}])


def being(s: Sampler) -> Draft:
    """Predicative adjectives: Die Lampe ist sehr schön. Wir waren müde."""
    if s.chance(0.5):
        subj = s.subject(frozenset({"person"}))
    else:
        subj = s.noun_np(describable(s), "def def this", 0.0)
    c = be(subj, _state(s, subj), s.choose("pres pres past"), s.chance(0.15))
    return draft(*pair(main_clause(c)), c)


def profession(s: Sampler) -> Draft:
    """Professions go without an article: Er ist Arzt. Er ist kein Arzt. Er ist ein netter Arzt."""
    men = [noun for noun in s.nouns_with(frozenset({"prof"})) if noun.en != "nurse"]
    woman = s.chance(0.2)
    noun = s.nouns["nurse"] if woman else s.pick(men)
    names = [name for name in s.names if name.gender == ("f" if woman else "m")]
    kin = [n for n in s.nouns_with(frozenset({"kin"})) if n.gender == ("f" if woman else "m")]
    pronoun = person("3sf" if woman else "3sm")
    subj = s.pick(
        (pronoun, NP(name=s.pick(names)), NP(s.choose("my your his her our"), s.pick(kin)))
    )
    tense, kind = s.choose("pres pres past"), s.choose("bare bare adj neg this")
    if kind == "this":
        return _introduction(s)
    adj = s.adjective(noun) if kind == "adj" else None
    np = NP("indef", noun, adj)
    de = np_german(np, "n", negated=kind == "neg") if kind != "bare" else noun.de
    en = f"{english(be(subj, NOTHING, tense, kind == 'neg'))} {np_english(np)}"
    return draft(en, f"{german(be(subj, NOTHING, tense))} {de}")


def _introduction(s: Sampler) -> Draft:
    """Das ist meine Schwester. Das sind unsere Hunde."""
    noun = s.pick(s.nouns_with(frozenset({"kin", "pet", "own", "home", "art", "private"})))
    np = NP(
        s.choose("my your his her our their"), noun, None, s.chance(0.2) and "kin" not in noun.tags
    )
    en, de = ("These are", "Das sind") if np.plural else ("This is", "Das ist")
    if s.chance(0.15):
        return draft(f"{en} not {np_english(np)}", f"{de} nicht {np_german(np, 'n')}")
    return draft(f"{en} {np_english(np)}", f"{de} {np_german(np, 'n')}")


def comparison(s: Sampler) -> Draft:
    """Comparatives: Anna ist älter als Peter. Der Tisch ist nicht so alt wie das Bett."""
    if s.chance(0.5):
        left, right, tags = s.subject(frozenset({"person"})), s.name(), frozenset({"person"})
        while left.pronoun or left.name == right.name or left.plural or not left.definite:
            left = s.subject(frozenset({"person"}))
        if s.chance(0.3):
            right = person(s.choose("1s 2s"))
    else:
        kind = frozenset({s.choose("cloth animal furn home read vessel private building")})
        noun, other = s.pick(s.nouns_with(kind)), s.pick(s.nouns_with(kind))
        if noun == other:
            return comparison(s)
        left, right = NP(s.choose("def this"), noun), NP("def", other)
        tags = noun.tags & other.tags
    fitting = [adj for adj in s.adjectives if adj.tags & tags and adj.en_more != "-"]
    if not fitting:
        return comparison(s)
    adj = s.pick(fitting)
    thing = np_german(right, "n")
    me = {"1s": "me", "2s": "you"}.get(right.pronoun, np_english(right))
    if s.chance(0.25):
        predicate = Phrase(f"as {adj.en} as {me}", f"so {adj.de} wie {thing}")
        return draft(*pair(main_clause(be(left, predicate, neg=s.chance(0.5)))))
    predicate = Phrase(f"{adj.en_more} than {me}", f"{adj.de_more} als {thing}")
    return draft(*pair(main_clause(be(left, predicate))))


def figures(s: Sampler) -> Draft:
    """Ages, prices, clock times: Sie ist zwanzig Jahre alt. Es ist halb acht."""
    en, de = NUMBERS[s.pick(tuple(NUMBERS))]
    kind = s.choose("age age price price clock name")
    if kind == "age":
        subj = s.subject(frozenset({"young", "pet", "adult"}))
        if subj.noun:
            old = "adult" in subj.noun.tags
            en, de = NUMBERS[s.pick((30, 40, 50) if old else (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))]
        tense = s.choose("pres pres past")
        return draft(
            *pair(main_clause(be(subj, Phrase(f"{en} years old", f"{de} Jahre alt"), tense)))
        )
    if kind == "price":
        cheap = s.chance(0.4)
        tags = (
            "dish baked vessel toy pencil postcard newspaper"
            if cheap
            else "cloth own pair repair lend"
        )
        en, de = NUMBERS[s.pick((2, 3, 4, 5, 6, 7, 8) if cheap else (10, 12, 20, 30, 40, 50))]
        noun = s.pick(
            [n for n in s.nouns_with(frozenset(tags.split())) if n.en not in ("key", "passport")]
        )
        np = s.noun_np(noun, "def this", 0.4)
        verb = Phrase("cost" if np.plural else "costs", "kosten" if np.plural else "kostet")
        return draft(
            f"{np_english(np)} {verb.en} {en} euros", f"{np_german(np, 'n')} {verb.de} {de} Euro"
        )
    if kind == "clock":
        clock = s.clock()
        return (
            draft(f"it is already {clock.en}", f"es ist schon {clock.de}")
            if s.chance(0.3)
            else draft(f"it is {clock.en}", f"es ist {clock.de}")
        )
    np = NP(s.choose("my his her your our"), s.pick(s.nouns_with(frozenset({"pet"}))))
    name = s.pick(PET_NAMES)
    return draft(f"{np_english(np)} is called {name}", f"{np_german(np, 'n')} heißt {name}")


def resting(s: Sampler) -> Draft:
    """Where things are: Der Schlüssel liegt auf dem Tisch. Die Vase steht neben der Tür."""
    verb = s.verbs[s.choose("lie stand")]
    np = s.noun_np(s.pick(s.nouns_with(verb.objects)), "def def poss indef owner num", 0.3)
    spot = s.spot(verb.en).at
    if s.chance(0.2):
        np = s.noun_np(s.pick(s.nouns_with(frozenset({"wall"}))), "def poss indef", 0.3)
        en, de = ("are hanging", "hängen") if np.plural else ("is hanging", "hängt")
        return draft(f"{np_english(np)} {en} on the wall", f"{np_german(np, 'n')} {de} an der Wand")
    c = Clause(np, verb, s.choose("pres prog"), pred=spot)
    return draft(*pair(main_clause(c)), c)


def feeling(s: Sampler) -> Draft:
    """Hunger haben, Angst haben vor: Ich habe Hunger. Er hat Angst vor dem Hund."""
    subj = s.subject(frozenset({"person"}))
    tense, neg = s.choose("pres pres past"), s.chance(0.25)
    kind = s.choose("hungry thirsty afraid afraid right time")
    have = Clause(subj, s.verbs["have"], tense)
    kein = "keinen " if neg else ""
    if kind == "afraid":
        fear = s.noun_np(s.pick(s.nouns_with(frozenset({"animal"}))), "def this", 0.2)
        de = f"{'keine ' if neg else ''}Angst vor {np_german(fear, 'd')}"
        en = f"afraid of {np_english(fear)}"
    elif kind == "time":
        word = Phrase("time", "Zeit") if s.chance(0.6) else Phrase("money", "Geld")
        when = s.pick((Phrase("today", "heute"), NOTHING, NOTHING))
        article = "keine" if word.en == "time" else "kein"
        de = " ".join(filter(None, [german(have), when.de, article, word.de]))
        verb = "had" if tense == "past" else "has" if subj.agreement == "3s" else "have"
        return draft(
            " ".join(filter(None, [np_english(subj, True), verb, "no", word.en, when.en])), de
        )
    else:
        noun = {"hungry": "Hunger", "thirsty": "Durst", "right": "Recht"}[kind]
        en, de = kind, (f"nicht {noun}" if neg and kind == "right" else f"{kein}{noun}")
        if kind == "right":
            de = "nicht recht" if neg else "recht"
    return draft(english(be(subj, Phrase(en, de), tense, neg)), f"{german(have)} {de}")


def existing(s: Sampler) -> Draft:
    """es gibt: In dieser Stadt gibt es zwei Museen."""
    noun = s.pick(s.nouns_with(frozenset({"public_place", "castle", "church", "bridge"})))
    np = s.noun_np(noun, "indef indef num no many", 0.35)
    if np.det == "many":
        np = NP("many", noun, None, True)
    towns = ("in this town|in dieser Stadt,in our town|in unserer Stadt,in Berlin|in Berlin,"
             "in Vienna|in Wien,in Cologne|in Köln,in Hamburg|in Hamburg")  # fmt: skip
    villages = (
        "in this village|in diesem Dorf,in our village|in unserem Dorf,"
        "in this street|in dieser Straße"
    )
    small = not np.plural and noun.en not in ("museum", "castle", "bridge")
    en, de = s.pick((f"{towns},{villages}" if small else towns).split(",")).split("|")
    where = Phrase(en, de)
    copula = "are" if np.plural else "is"
    return draft(
        f"there {copula} {np_english(np)} {where.en}", f"{where.de} gibt es {np_german(np, 'a')}"
    )


def since(s: Sampler) -> Draft:
    """What still goes on is present with seit: Sie wohnt seit drei Jahren in Wien."""
    verb = s.verbs[s.choose("live live work wait learn")]
    subj = s.subject(verb.subjects)
    number = s.pick((2, 3, 4) if verb.en == "wait" else (2, 3, 4, 5, 6, 7, 8, 10))
    units = "years|Jahren months|Monaten weeks|Wochen" if verb.en != "wait" else "hours|Stunden"
    unit = Phrase(*s.choose(units).split("|"))
    en, de = NUMBERS[number]
    c = s.objects(
        Clause(subj, verb, "perf", time=Phrase(f"for {en} {unit.en}", f"seit {de} {unit.de}"))
    )
    if verb.en == "learn":
        c = replace(c, acc=s.noun_np(s.pick(s.nouns_with(frozenset({"language"}))), "bare"))
    elif verb.en == "work":
        c = replace(c, place=s.place(verb))
    return draft(english(c), german(replace(c, tense="pres")), c)


def weather(s: Sampler) -> Draft:
    """Impersonal es: Es ist heute kalt. Gestern hat es geregnet."""
    word = s.pick((Phrase("cold", "kalt"), Phrase("warm", "warm"), Phrase("hot", "heiß")))
    tense = s.choose("pres past fut")
    time = Phrase("today", "heute") if tense == "pres" else s.time(tense)
    while "ago" in time.en:
        time = s.time(tense)
    be_en, be_de = {"pres": ("is", "ist"), "past": ("was", "war"), "fut": ("will be", "wird")}[
        tense
    ]
    rain = {"pres": ("is raining", "regnet", ""), "past": ("rained", "hat", " geregnet"),
            "fut": ("will rain", "wird", " regnen")}[tense]  # fmt: skip
    if s.chance(0.5):
        end = " sein" if tense == "fut" else ""
        degree = s.pick((NOTHING, Phrase("very ", "sehr ")))
        return draft(f"it {be_en} {degree.en}{word.en} {time.en}",
                     f"es {be_de} {time.de} {degree.de}{word.de}{end}")  # fmt: skip
    if s.chance(0.5):
        return draft(f"{time.en} it {rain[0]}", f"{time.de} {rain[1]} es{rain[2]}")
    return draft(f"it {rain[0]} {time.en}", f"es {rain[1]} {time.de}{rain[2]}")


STATEMENTS = (
    (13, statement), (9, fronted), (9, moving), (9, negation), (3, already), (11, modal),
    (5, giving), (4, dative), (3, liking), (3, gern), (2, playing), (4, being), (2, profession),
    (3, comparison), (3, figures), (4, resting), (2, feeling), (1, existing), (2, since),
    (1, weather),
)  # fmt: skip
