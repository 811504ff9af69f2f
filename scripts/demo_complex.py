"""Patterns of several clauses: conjunctions, relative clauses, infinitives, coordination."""

from __future__ import annotations

from dataclasses import replace

from demo_build import (
    ALTHOUGH,
    BECAUSE,
    FORGET,
    IF,
    RAIN,
    THAT,
    TRY,
    WHETHER,
    WHILE,
    Draft,
    after_sub,
    be,
    draft,
    pair,
    sub_clause,
    the_pronoun,
    with_sub,
)
from demo_grammar import (
    DEFINITE,
    NOTHING,
    NP,
    Clause,
    english,
    german,
    negated,
    np_english,
    np_german,
    person,
    to_infinitive,
)
from demo_lexicon import NUMBERS
from demo_questions import COMPLAINTS, PRAISE, about, asked, event, person_word, thing_for
from demo_sampler import PRESENT_ONLY, Sampler
from demo_statements import describable
from demo_verbs import Phrase

HUMAN = frozenset({"person"})
MATRIX = {"try": TRY, "forget": FORGET, "order": FORGET}
ERRANDS = (
    (Phrase("to the supermarket", "in den Supermarkt"), "shop"),
    (Phrase("to the market", "auf den Markt"), "shop"),
    (Phrase("to the station", "zum Bahnhof"), "pick up"),
    (Phrase("to the airport", "zum Flughafen"), "pick up"),
    (Phrase("to the library", "in die Bibliothek"), "read,learn,work"),
    (Phrase("to the garden", "in den Garten"), "rest,read"),
    (Phrase("to the kitchen", "in die Küche"), "cook,bake"),
    (Phrase("to the restaurant", "ins Restaurant"), "meet"),
    (Phrase("to the café", "ins Café"), "meet"),
    (Phrase("to the office", "ins Büro"), "work"),
)

# --- subordinate clauses


def _reason(s: Sampler, subj: NP) -> Clause:
    """Why somebody does nothing: he is tired, it is raining, he must work."""
    who = the_pronoun(subj)
    kind = s.choose("ill time work sleep shop guests")
    if kind == "ill":
        return be(
            who, s.pick((Phrase("ill", "krank"), Phrase("tired", "müde"), Phrase("sad", "traurig")))
        )
    if kind == "time":
        return Clause(who, s.verbs["have"], "pres", acc=None, pred=Phrase("no time", "keine Zeit"))
    if kind == "work":
        c = Clause(who, s.verbs["work"], modal=s.choose("must have"))
        return replace(c, place=s.pick((NOTHING, s.place(c.verb))))
    if kind == "sleep":
        return Clause(who, s.verbs["sleep"], "past", manner=Phrase("badly", "schlecht"))
    if kind == "shop":
        return Clause(who, s.verbs["shop"], modal=s.choose("must want"))
    return Clause(
        who, s.verbs["clean"], modal="must", acc=NP("def", s.nouns[s.choose("kitchen bathroom")])
    )


def because(s: Sampler) -> Draft:
    """weil with the verb last: Er kommt nicht mit, weil er arbeiten muss."""
    verb = s.one_of("come along,go,dance,swim,play,go,visit,call,travel")
    subj = s.somebody()
    c = negated(s.objects(Clause(subj, verb, s.choose("fut pres"))))
    while c.pred.en.endswith(("kitchen", "garden", "balcony", "living room")):
        c = replace(c, pred=s.goal(verb))
    if c.verb.en == "play":
        c = replace(c, prep=None, pred=Phrase("with us", "mit uns"))
    if c.tense == "pres":
        c = replace(c, modal=s.choose("can want"))
    if s.chance(0.4):
        c = replace(c, time=s.time("fut"))
    reason = sub_clause(_reason(s, subj), BECAUSE)
    both = after_sub(reason, c) if s.chance(0.25) and subj.pronoun else with_sub(c, reason)
    return draft(*pair(both), c)


def that_clause(s: Sampler) -> Draft:
    """dass and ob: Ich glaube, dass Anna morgen kommt. Weißt du, ob er den Brief gelesen hat?"""
    c = s.adorned(s.clause("t t d dt p i i"))
    if s.chance(0.2):
        np = s.noun_np(describable(s), "def this", 0.0)
        c = about(s, np)
        c = replace(c, subj=np)
    opener = s.choose("think think hope say know not do")
    teller = s.subject(HUMAN)
    while teller.pronoun == "2s":
        teller = s.subject(HUMAN)
    if opener == "hope":
        c = replace(c, tense="fut", freq=NOTHING, time=s.pick((NOTHING, s.time("fut"))))
    if c.verb.en in PRESENT_ONLY or c.verb.en == "be":
        opener = "think" if opener == "hope" else opener
        c = replace(c, tense="pres", time=NOTHING)
    if opener in ("not", "do"):
        c = replace(asked(c), subj=_third(s, c.subj))
    third = teller.agreement == "3s"
    if opener == "not":
        sub, en, de = sub_clause(c, WHETHER), "I do not know", "ich weiß nicht"
    elif opener == "do":
        sub, en, de = sub_clause(c, WHETHER), "do you know", "weißt du"
    else:
        forms = {
            "think": ("think", "glaube glaubst glaubt glauben"),
            "hope": ("hope", "hoffe hoffst hofft hoffen"),
            "say": ("say", "sage sagst sagt sagen"),
            "know": ("know", "weiß weißt weiß wissen"),
        }[opener]
        finite = forms[1].split()[["1s", "2s", "3s", ""].index(teller.agreement)]
        en = f"{np_english(teller, True)} {forms[0]}{'s' if third else ''}"
        de = f"{np_german(teller, 'n')} {finite}"
        sub = sub_clause(c, THAT)
    return draft(f"{en} {sub.en}", f"{de}, {sub.de}", c, end="?" if opener == "do" else ".")


def _third(s: Sampler, subj: NP) -> NP:
    """Somebody else than me and you for what I do not know."""
    return s.name(titled=False) if subj.pronoun in ("1s", "2s", "1p") else subj


def condition(s: Sampler) -> Draft:
    """wenn, obwohl, während first or last: Wenn es regnet, bleiben wir zu Hause."""
    kind = s.choose("rain tired time money although although while")
    if kind == "while":
        return _while(s)
    subj = s.somebody()
    ill = be(the_pronoun(subj), s.pick((Phrase("tired", "müde"), Phrase("ill", "krank"))))
    verb, conjunction = s.one_of("go,work,swim,visit,read,write,help,clean,tidy up"), IF
    c = s.objects(Clause(subj, verb, "fut"), 0.1)
    if kind == "although":
        condition_clause, conjunction = s.pick((_rain("prog"), ill)), ALTHOUGH
    elif kind == "rain":
        c = s.objects(Clause(subj, s.one_of("stay,read,watch TV,write,cook"), "fut"), 0.0)
        c = replace(c, place=Phrase("at home", "zu Hause")) if c.verb.en == "stay" else c
        condition_clause = _rain("pres")
    elif kind == "tired":
        bed = s.pick((Phrase("to bed", "ins Bett"), Phrase("home", "nach Hause")))
        c = Clause(subj, s.verbs["go"], modal=s.choose("should must may"), pred=bed)
        condition_clause = ill
    else:
        if kind == "money":
            c = s.objects(Clause(subj, s.one_of("travel,fly,buy,buy"), "fut"), 0.1)
        free = Phrase("time", "Zeit") if kind == "time" else Phrase("enough money", "genug Geld")
        condition_clause = Clause(the_pronoun(subj), s.verbs["have"], pred=free)
    sub = sub_clause(condition_clause, conjunction)
    first = s.chance(0.5) and (bool(subj.pronoun) or condition_clause.verb == RAIN)
    return draft(*pair(after_sub(sub, c) if first else with_sub(c, sub)), c)


def _while(s: Sampler) -> Draft:
    left = s.objects(Clause(s.somebody(), s.one_of("cook,sleep,read,work"), "prog"), 0.0)
    other = s.one_of("sing,dance,write,repair,clean")
    right = s.objects(Clause(s.name(), other, "prog"), 0.1)
    if right.subj == left.subj:
        return _while(s)
    sub = sub_clause(left, WHILE)
    both = after_sub(sub, right) if s.chance(0.5) else with_sub(right, sub)
    return draft(*pair(both), left, right)


def _rain(tense: str) -> Clause:
    return Clause(person("3in"), RAIN, tense)


# --- relative clauses, infinitives, coordination


def relative(s: Sampler) -> Draft:
    """Relative clauses: Das Buch, das ich gestern gekauft habe, ist interessant."""
    if s.chance(0.35):
        return _relative_subject(s)
    verb = s.one_of("buy,see,find,read,sell,write,visit,repair,lose")
    np = thing_for(s, verb, PRAISE + " " + COMPLAINTS, "def")
    subj = s.subject(HUMAN)
    c = Clause(subj, verb, s.choose("past fut") if verb.past != verb.en else "fut")
    if verb.en in ("find", "lose", "sell"):
        c = replace(c, tense="past")
    c = replace(c, time=s.time(c.tense)) if s.chance(0.5) else c
    column = 3 if np.plural else "mfn".index(np.gender)
    rel = DEFINITE["a"].split()[column]
    said = about(s, np)
    predicate = said.pred
    be_en = "are" if np.plural else "is"
    be_de = "sind" if np.plural else "ist"
    en = f"{np_english(np)} that {english(c)} {be_en} {predicate.en}"
    de = f"{np_german(np, 'n')}, {german(c, 'final', rel)}, {be_de} {predicate.de}"
    return draft(en, de, replace(c, acc=np))


def _relative_subject(s: Sampler) -> Draft:
    """Ich kenne den Mann, der hier wohnt. Die Frau, die das Auto verkauft hat, ist nett."""
    noun = s.pick(s.nouns_with(frozenset({"prof", "someone"})))
    np = NP("def", noun)
    c = s.adorned(s.clause("t t d p i"))
    while not c.verb.subjects & {"person"} or c.verb.reflexive or c.tense == "perf":
        c = s.adorned(s.clause("t t d p i"))
    for obj in (c.acc, c.dat, c.prep):
        if obj and (obj.pronoun.startswith("3") or obj.noun == noun):
            return _relative_subject(s)
    c = replace(c, subj=np)
    if c.verb.past == c.verb.en:
        c = replace(c, tense="fut", freq=NOTHING, time=NOTHING)
    rel_en = english(c).removeprefix(np_english(np)).strip()
    rel = DEFINITE["n"].split()["mfn".index(np.gender)]
    rel_de = german(c, "final").removeprefix(np_german(np, "n")).strip()
    if s.chance(0.5):
        knower = person(s.choose("1s 2s 3sm 3sf 1p"))
        know = Clause(knower, s.verbs["know"], acc=np)
        return draft(f"{english(know)} who {rel_en}", f"{german(know)}, {rel} {rel_de}", c)
    word = person_word(s)
    return draft(f"{np_english(np)} who {rel_en} is {word.en}",
                 f"{np_german(np, 'n')}, {rel} {rel_de}, ist {word.de}", c)  # fmt: skip


def infinitive(s: Sampler) -> Draft:
    """zu and um zu: Sie hat vergessen, das Fenster zuzumachen."""
    kind = s.choose("forget try order aim aim easy")
    if kind == "aim":
        return _aim(s)
    verbs = "close,turn off,call,write,pay,wash,clean,bring along,take along,answer,tidy up,feed"
    if kind in ("try", "easy"):
        verbs = "repair,translate,learn,understand,find,help,cook,explain,open,answer,sell"
    verb = s.one_of(verbs)
    if kind == "easy":
        c = s.objects(Clause(person("1p"), verb), 0.15)
        if any(np and (np.pronoun or np.det == "our") for np in (c.acc, c.dat)):
            return infinitive(s)
        inf = to_infinitive(c)
        word = s.pick((Phrase("important", "wichtig"), Phrase("difficult", "schwierig"),
                       Phrase("not easy", "nicht einfach")))  # fmt: skip
        return draft(f"it is {word.en} {inf.en}", f"es ist {word.de}, {inf.de}", c)
    subj = s.subject(HUMAN)
    inf_clause = s.objects(Clause(subj, verb), 0.15)
    inf = to_infinitive(inf_clause)
    matrix = Clause(subj, MATRIX[kind], s.choose("past past fut") if kind != "try" else "past")
    if s.chance(0.2) and kind == "forget":
        matrix = replace(matrix, tense="past", neg=True)
    return draft(f"{english(matrix)} {inf.en}", f"{german(matrix)}, {inf.de}", inf_clause)


def _aim(s: Sampler) -> Draft:
    """um zu: Er geht in die Stadt, um Brot zu kaufen."""
    subj = s.subject(frozenset({"adult"}))
    mover = s.one_of("go,travel,drive")
    c = Clause(subj, mover, s.choose("past fut prog"))
    if mover.en == "travel" or (mover.en == "drive" and s.chance(0.5)):
        goal, verbs = s.goal(s.verbs["travel"]), "visit,learn,work,rest,visit"
    else:
        goal, verbs = s.pick(ERRANDS[:4] if mover.en == "drive" else ERRANDS)
    verb = s.one_of(verbs)
    aim = s.objects(Clause(subj, verb), 0.15)
    if verb.en == "learn":
        italian = goal.en in ("to Rome", "to Italy")
        aim = replace(aim, acc=NP("bare", s.nouns["Italian" if italian else "German"]))
    inf = to_infinitive(aim)
    c = replace(c, pred=goal)
    return draft(f"{english(c)} {inf.en}", f"{german(c)}, um {inf.de}", c, aim)


def coordination(s: Sampler) -> Draft:
    """Two main clauses: Anna kocht eine Suppe und Peter liest die Zeitung."""
    tense = s.choose("prog prog past fut")
    people = [s.name(), s.subject(frozenset({"kin"}))]
    if people[0].name and s.chance(0.4):
        people[1] = s.name(titled=False)
    if people[0] == people[1]:
        return coordination(s)
    verbs = (
        "cook,bake,read,write,repair,clean,feed,sing,paint,wash,tidy up,drink,sleep,work,dance,"
        "watch TV"
    )
    clauses = [s.objects(Clause(who, s.one_of(verbs), tense), 0.15) for who in people]
    if clauses[0].verb == clauses[1].verb or any(c.verb.past == c.verb.en for c in clauses):
        return coordination(s)
    word, wort, comma = s.pick((("and", "und", ""), ("and", "und", ""), ("but", "aber", ",")))
    left, right = clauses
    return draft(f"{english(left)}{comma} {word} {english(right)}",
                 f"{german(left)}{comma} {wort} {german(right)}", *clauses)  # fmt: skip


def when_past(s: Sampler) -> Draft:
    """als for once in the past: Als ich ein Kind war, hatte ich einen Hund."""
    kid = s.pick([*map(person, ("1s", "3sm", "3sf", "2s")), s.name(titled=False)])
    was = be(kid, Phrase("a child", "ein Kind"), "past")
    if s.chance(0.5):
        en, de = NUMBERS[s.pick((5, 6, 7, 8, 9, 10, 11, 12))]
        was = be(kid, Phrase(f"{en} years old", f"{de} Jahre alt"), "past")
    who = the_pronoun(kid)
    c = s.objects(Clause(who, s.one_of("have,live,live,learn,learn"), "past"))
    if c.verb.en == "learn":
        c = replace(c, acc=s.noun_np(s.nouns[s.choose("German English Italian")], "bare"))
    if c.verb.en == "have":
        noun = s.pick(
            s.nouns_with(frozenset({"pet", "bicycle", "horse", "guitar", "doll", "ball"}))
        )
        c = replace(c, acc=s.noun_np(noun, "indef indef num", 0.3))
    sub = sub_clause(was, Phrase("when", "als"))
    return draft(*pair(after_sub(sub, c)), c)


def know_when(s: Sampler) -> Draft:
    """Indirect questions: Weißt du, wann der Zug ankommt? Ich weiß nicht, wo er wohnt."""
    word = s.pick(
        (
            Phrase("when", "wann"),
            Phrase("when", "wann"),
            Phrase("why", "warum"),
            Phrase("where", "wo"),
        )
    )
    if word.en == "where":
        verb = s.one_of("live,work,buy,find,meet")
        subj = s.subject(verb.subjects)
        tense = "past" if verb.frame == "t" else "pres"
        c = replace(s.objects(Clause(subj, verb, tense)), place=NOTHING)
    else:
        c = event(s, "perf", "prog")
        if word.en == "when" and c.tense == "pres" and c.verb.en != "arrive":
            c = replace(c, tense="fut")
    c = replace(asked(c), subj=_third(s, c.subj))
    sub = sub_clause(c, word)
    if s.chance(0.5):
        return draft(f"do you know {sub.en}", f"weißt du, {sub.de}", c, end="?")
    return draft(f"I do not know {sub.en}", f"ich weiß nicht, {sub.de}", c)


COMPLEX = (
    (5, because), (6, that_clause), (5, condition), (5, relative), (5, infinitive),
    (4, coordination), (1, when_past), (3, know_when),
)  # fmt: skip
