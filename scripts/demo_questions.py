"""Patterns of fixed sentences, questions, commands and pronouns with their antecedents."""

from __future__ import annotations

from dataclasses import replace

from demo_build import (
    ABSOLUTE,
    BECAUSE,
    Draft,
    be,
    capital,
    draft,
    join,
    pair,
    sub_clause,
    the_pronoun,
    with_sub,
)
from demo_grammar import (
    NOTHING,
    NP,
    Clause,
    english,
    german,
    imperative,
    np_english,
    np_german,
    person,
)
from demo_lexicon import Adjective
from demo_sampler import PRESENT_ONLY, Sampler
from demo_verbs import Phrase, Verb

FIXED = (
    Phrase("I love you.", "Ich liebe dich."),
    Phrase("Do you love me?", "Liebst du mich?"),
    Phrase("What time is it?", "Wie spät ist es?"),
    Phrase("What is your name?", "Wie heißt du?"),
    Phrase("Where do you come from?", "Woher kommst du?"),
    Phrase("How old are you?", "Wie alt bist du?"),
    Phrase("I do not know.", "Ich weiß es nicht."),
    Phrase("That is right.", "Das stimmt."),
    Phrase("That is not right.", "Das stimmt nicht."),
    Phrase("Happy birthday!", "Alles Gute zum Geburtstag!"),
    Phrase("Good night!", "Gute Nacht!"),
    Phrase("How much does it cost?", "Wie viel kostet es?"),
)
GREETINGS = (
    Phrase("Good morning", "Guten Morgen"),
    Phrase("Good evening", "Guten Abend"),
    Phrase("Thank you very much", "Vielen Dank"),
    Phrase("Goodbye", "Auf Wiedersehen"),
    Phrase("See you tomorrow", "Bis morgen"),
)
HUMAN = frozenset({"person"})
COMPLAINTS = "old small big expensive long short boring heavy broken dirty"
PRAISE = "beautiful pretty new cheap modern interesting warm funny fast"


def idiom(s: Sampler) -> Draft:
    """Fixed sentences and greetings: Ich liebe dich. Guten Morgen, Anna!"""
    kind = s.choose("fixed greet greet how name from")
    if kind == "fixed":
        phrase = s.pick(FIXED)
        return Draft(phrase.en, phrase.de)
    if kind == "greet":
        phrase, np = s.pick(GREETINGS), s.name()
        return Draft(f"{phrase.en}, {np_english(np)}!", f"{phrase.de}, {np_german(np, 'n')}!")
    if kind == "how":
        np = s.noun_np(s.pick(s.nouns_with(frozenset({"kin", "baby"}))), "poss", 0.0)
        verb = "are" if np.plural else "is"
        return draft(f"how {verb} {np_english(np)}", f"wie geht es {np_german(np, 'd')}", end="?")
    name = s.name(titled=False)
    if kind == "name":
        pronoun, owner = s.pick((("1s", "my"), ("3sm", "his"), ("3sf", "her")))
        gender = name.name.gender if name.name else ""
        if pronoun[2:] not in ("", gender):
            return idiom(s)
        heissen = {"1s": "heiße"}.get(pronoun, "heißt")
        subject = np_german(person(pronoun), "n")
        called = f"{subject} {heissen} {np_german(name, 'n')}"
        return draft(f"{owner} name is {np_english(name)}", called)
    town = s.pick([p.at for p in s.places if "far" in p.groups and "moun" not in p.at.en])
    subj = s.subject(HUMAN)
    verb = "comes" if subj.agreement == "3s" else "come"
    kommen = {"1s": "komme", "2s": "kommst", "3s": "kommt", "": "kommen"}[subj.agreement]
    de = town.de.replace("in ", "aus ", 1)
    return draft(f"{np_english(subj, True)} {verb} {town.en.replace('in ', 'from ', 1)}",
                 f"{np_german(subj, 'n')} {kommen} {de}")  # fmt: skip


# --- questions and commands


def asked(c: Clause) -> Clause:
    """The clause as one would ask it: about you rather than about me."""
    if c.subj.pronoun not in ("1s", "1p"):
        return c
    changes = {
        role: person("1s")
        for role, np in (("acc", c.acc), ("dat", c.dat), ("prep", c.prep))
        if np and np.pronoun == "2s"
    }
    return replace(c, subj=person("2s"), **changes)  # type: ignore[arg-type]


def yes_no(s: Sampler) -> Draft:
    """Questions with the verb first: Hast du den Brief geschrieben?"""
    c = asked(s.adorned(s.clause("t t t d dt p i i")))
    return draft(english(c, "question"), german(c, "question"), c, end="?")


def object_question(s: Sampler) -> Draft:
    """What, whom, which: Was hast du gekauft? Welches Buch liest Anna?"""
    c = s.clause("t t t d")
    while c.verb.en in ("have", "speak") or not c.verb.subjects & {"person", "adult", "young"}:
        c = s.clause("t t t d")
    people = bool(c.verb.objects & {"kin", "name"})
    target = c.dat or c.acc
    assert target is not None
    bare = asked(replace(c, acc=None, dat=None))
    case = "d" if c.dat else "a"
    if (
        target.noun
        and not target.noun.tags & {"kin", "music", "language", "money"}
        and s.chance(0.55)
    ):
        plural = target.plural or "pair" in target.noun.tags
        which = NP("which", target.noun, None, plural)
        many = plural and not c.dat and s.chance(0.6)
        word = Phrase(np_english(which), np_german(which, case))
        if many:
            word = Phrase(f"how many {target.noun.en_pl}", f"wie viele {target.noun.de_pl}")
    elif people:
        word = Phrase("who", "wem" if c.dat else "wen")
    else:
        word = Phrase("what", "was")
    if s.chance(0.35) and bare.tense in ("past", "fut"):
        bare = replace(bare, time=s.time(bare.tense))
    joined = c if word.en not in ("who", "what") else bare
    return draft(
        english(bare, "question", word.en), german(bare, "question", word.de), joined, end="?"
    )


def subject_question(s: Sampler) -> Draft:
    """Who as the subject: Wer hat das Fenster aufgemacht? Wem gehört der Hund?"""
    if s.chance(0.3):
        tags = frozenset(["private", "small", "own", "furn", "inst", "pet", "home", "cloth"])
        np = s.noun_np(s.pick(s.nouns_with(tags)), "def this", 0.4)
        be_en, be_de = ("do", "gehören") if np.plural else ("does", "gehört")
        return draft(
            f"who {be_en} {np_english(np)} belong to", f"wem {be_de} {np_german(np, 'n')}", end="?"
        )
    c = s.adorned(s.clause("t t d dt p i"), time=False)
    while not c.verb.subjects & {"person"} or c.verb.en in PRESENT_ONLY:
        c = s.adorned(s.clause("t t d dt p i"), time=False)
    if c.verb.past == c.verb.en or c.tense not in ("past", "fut", "perf"):
        c = replace(c, tense="fut", freq=NOTHING)
    someone = person("3sm")
    if any(np and np.pronoun in ("3sm", "3sf") for np in (c.acc, c.dat, c.prep)):
        return subject_question(s)
    c = replace(c, subj=someone)
    en, de = english(c), german(c)
    return draft("who" + en.removeprefix("he"), "wer" + de.removeprefix("er"), c, end="?")


def adverb_question(s: Sampler) -> Draft:
    """When, where, where to, why: Wann kommt der Zug an? Wohin fährst du?"""
    kind = s.choose("when when why where to find is")
    if kind == "find":
        tags = frozenset(["small", "lose", "own", "pet", "private"])
        np = s.noun_np(s.pick(s.nouns_with(tags)), "def def poss owner", 0.3)
        c, word = be(np, NOTHING), Phrase("where", "wo")
    elif kind == "is":
        c, word = be(s.subject(HUMAN), _mood(s), s.choose("pres past")), Phrase("why", "warum")
    elif kind == "to":
        verb = s.one_of("go,travel,drive,fly")
        c = Clause(s.subject(verb.subjects), verb, s.choose("past fut prog"))
        c = replace(c, time=s.time(c.tense)) if s.chance(0.5) else c
        word = Phrase("where", "wohin")
    elif kind == "where":
        verb = s.one_of("live,work,eat,wait,buy,find,meet,sleep")
        tense = s.choose("past past fut") if verb.frame == "t" else s.choose("pres past")
        c = s.objects(Clause(s.subject(verb.subjects), verb, tense))
        c, word = replace(c, place=NOTHING), Phrase("where", "wo")
    else:
        c = event(s, "perf")
        if kind == "when" and c.tense == "prog":
            c = replace(c, tense=s.choose("past fut"))
        word = Phrase("when", "wann") if kind == "when" else Phrase("why", "warum")
    c = asked(c)
    return draft(english(c, "question", word.en), german(c, "question", word.de), c, end="?")


def event(s: Sampler, *barred: str) -> Clause:
    """Something that happens at a time one can ask for, in none of the barred tenses."""
    states = {"have", "love", "know", "belong to", "live", "need", "understand", "follow", "cry"}
    c = s.clause("t t d i i i")
    while c.verb.en in states or c.tense in barred:
        c = s.clause("t t d i i i")
    return c


# What nobody is told to do.
UNCOMMANDED = {
    "have", "love", "know", "need", "lose", "understand", "see", "belong to", "find", "miss",
    "fall asleep", "arrive", "cry", "speak", "live", "fly", "wear", "laugh", "dream", "remember",
    "look forward", "forget", "wake up", "thank", "follow",
}  # fmt: skip


def command(s: Sampler) -> Draft:
    """Commands: Mach die Tür zu! Bitte ruf mich heute Abend an. Beeil dich!"""
    c = s.clause("t t t d dt p spot seat i")
    while c.verb.en in UNCOMMANDED or not c.verb.subjects & {"person", "adult", "young"}:
        c = s.clause("t t t d dt p spot seat i")
    c = replace(s.objects(Clause(person("2s"), c.verb), 0.15), neg=s.chance(0.15))
    for np in (c.acc, c.dat, c.prep):
        # "Wash her coat!" is fine, "Ask you!" is not.
        if np and (np.pronoun.startswith("2") or (np.det == "your" and s.chance(0.3))):
            return command(s)
    if c.neg and (c.verb.frame in ("p", "dt") or (c.acc and not c.acc.definite)):
        c = replace(c, neg=False)
    if not c.neg and c.pred is NOTHING and s.chance(0.25):
        soon = ("today", "tomorrow", "tomorrow morning", "this evening")
        c = replace(c, time=s.pick([time for time in s.times["fut"] if time.en in soon]))
    please = s.chance(0.4) and not c.neg
    return draft(*pair(imperative(c, please)), c, end="." if please else "!")


# --- pronouns and their antecedents


def _fitting(s: Sampler, tags: frozenset[str], words: str = "") -> list[Adjective]:
    allowed = words.split()
    return [a for a in s.adjectives if a.tags & tags and (not words or a.en in allowed)]


def _degree(s: Sampler, adj: Adjective, complaint: bool) -> Phrase:
    """The adjective, sometimes with very, or with too where that is a complaint."""
    word = Phrase(adj.en, adj.de)
    if complaint and adj.en in ("small", "big", "long", "short"):
        return join(Phrase("too", "zu"), word)
    if adj.en in ABSOLUTE or s.chance(0.5):
        return word
    if complaint and s.chance(0.7):
        return join(Phrase("too", "zu"), word)
    return join(Phrase("very", "sehr"), word)


def about(s: Sampler, np: NP, words: str = "", tense: str = "pres") -> Clause:
    """What the thing is: it is too small; er ist zu klein.  The adjective is one of `words`."""
    assert np.noun is not None
    fitting = [adj for adj in _fitting(s, np.noun.tags, words) if adj != np.adj]
    degree = _degree(s, s.pick(fitting), words == COMPLAINTS)
    return be(the_pronoun(np), degree, tense)


def thing_for(s: Sampler, verb: Verb, words: str, determiners: str = "def def this") -> NP:
    """An object of the verb that one of the adjectives can be said of."""
    barred = {"person", "food", "animal", "baby"}
    fitting = [
        noun
        for noun in s.nouns_with(verb.objects)
        if noun.en_pl != "-" and not noun.tags & barred and _fitting(s, noun.tags, words)
    ]
    return s.noun_np(s.pick(fitting), determiners, 0.0)


def _past(verb: Verb) -> str:
    return "perf" if verb.past == verb.en else "past"


def but_it(s: Sampler) -> Draft:
    """it by its antecedent: Ich habe die Lampe gekauft, aber sie ist kaputt."""
    names, words, linked = s.pick((
        ("buy,buy,have,wear,read,try on", COMPLAINTS, "but"),
        ("buy,try on,visit,read,photograph", PRAISE, "because"),
        ("sell,sell", COMPLAINTS, "because"),
        ("throw away", "old dirty broken", "because"),
        ("repair", "broken", "because"),
        ("wash,clean", "dirty", "because"),
    ))  # fmt: skip
    verb = s.one_of(names)
    np = thing_for(s, verb, words, "indef" if verb.en == "have" else "def def this")
    subj = s.subject(verb.subjects)
    tense = s.pick((_past(verb), _past(verb), "fut")) if linked == "because" else _past(verb)
    c = Clause(subj, verb, "pres" if verb.en == "have" else tense, acc=np)
    said = about(s, np, words, "past" if linked == "because" and c.tense != "fut" else "pres")
    if linked == "because":
        both = with_sub(c, sub_clause(said, BECAUSE))
    else:
        both = Phrase(f"{english(c)}, but {english(said)}", f"{german(c)}, aber {german(said)}")
    return draft(*pair(both), c)


def it_object(s: Sampler) -> Draft:
    """it as an object: Der Mantel ist alt, aber ich trage ihn oft."""
    names, words, linked, neg = s.pick((
        ("buy,buy,see,find,read,wear,visit,order", PRAISE, "and", False),
        ("buy,see,read,visit", PRAISE, "but", True),
        ("sell", COMPLAINTS, "and", False),
        ("throw away", "old dirty broken", "and", False),
        ("buy,wear,read", COMPLAINTS, "but", False),
        ("give,show,lend,send", PRAISE, "and", False),
        ("repair", "broken", "and", False),
        ("wash,clean", "dirty", "and", False),
        ("forget,lose", PRAISE, "but", False),
        ("bring along,take along,find", PRAISE, "and", False),
    ))  # fmt: skip
    verb = s.one_of(names)
    if verb.en == "order":
        verb = s.verbs["take along"]
    np = thing_for(s, verb, words)
    subj = s.subject(HUMAN)
    while not subj.pronoun and not subj.name:
        subj = s.subject(HUMAN)
    tense = "fut" if verb.past == verb.en else s.choose("past fut")
    if verb.en in ("forget", "lose", "find", "look for"):
        tense = "past"
    c = Clause(subj, verb, tense, acc=the_pronoun(np), neg=neg)
    if verb.frame == "dt":
        c = replace(c, dat=s.receiver(subj))
    if s.chance(0.5):
        c = replace(c, time=s.time(tense, verb))
    before = words != PRAISE and linked == "and" and tense == "past"
    said = replace(about(s, np, words, "past" if before else "pres"), subj=np)
    word, comma = ("aber", ",") if linked == "but" else ("und", "")
    return draft(f"{english(said)}{comma} {linked} {english(c)}",
                 f"{german(said)}{comma} {word} {german(c)}", replace(c, acc=np))  # fmt: skip


def two_sentences(s: Sampler) -> Draft:
    """A second sentence takes the first one up: Anna hat ein Fahrrad. Es ist neu."""
    kind = s.choose("where have have have person")
    if kind == "where":
        verb = s.one_of("lie,stand")
        np = s.noun_np(s.pick(s.nouns_with(verb.objects)), "def poss", 0.1)
        c = Clause(the_pronoun(np), verb, "pres", pred=s.spot(verb.en).at)
        first = Phrase(english(be(np, NOTHING), "question", "where"),
                       german(be(np, NOTHING), "question", "wo"))  # fmt: skip
        return draft(f"{first.en}? {capital(english(c))}", f"{first.de}? {capital(german(c))}",
                     replace(c, subj=np))  # fmt: skip
    if kind == "have":
        verb = s.one_of("have,have,buy")
        np = thing_for(s, verb, f"{PRAISE} {COMPLAINTS}", "indef")
        subj = s.subject(HUMAN)
        c = Clause(subj, verb, "past" if verb.en == "buy" else "pres", acc=np)
        said = about(s, np)
    else:
        verb = s.one_of("know,meet,see,visit")
        owner = person(s.choose("1s 2s 1p"))
        noun = s.pick(s.nouns_with(frozenset({"kin"})))
        c = Clause(owner, verb, "pres" if verb.en == "know" else "past", acc=NP(
            {"1s": "your", "2s": "my", "1p": "your"}[owner.pronoun], noun))  # fmt: skip
        assert c.acc is not None
        said = be(the_pronoun(c.acc), person_word(s))
    return draft(
        f"{english(c)}. {capital(english(said))}", f"{german(c)}. {capital(german(said))}", c
    )


def person_word(s: Sampler) -> Phrase:
    adj = s.pick([a for a in s.adjectives if a.tags & {"person", "state"}])
    very = s.pick((Phrase("very ", "sehr "), NOTHING))
    return Phrase(very.en + adj.en, very.de + adj.de)


def _mood(s: Sampler) -> Phrase:
    adj = s.pick([a for a in s.adjectives if "state" in a.tags])
    return s.pick((Phrase(adj.en, adj.de), Phrase("very " + adj.en, "sehr " + adj.de)))


QUESTIONS = (
    (2, idiom), (8, yes_no), (6, object_question), (4, subject_question), (6, adverb_question),
    (6, command), (6, but_it), (5, it_object), (4, two_sentences),
)  # fmt: skip
