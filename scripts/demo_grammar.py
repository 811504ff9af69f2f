"""The hand-written grammar of the demo corpus: noun phrases and clauses in English and German.

A `Clause` says what is meant; `english` and `german` each spell it out in one word order.  Where
German leaves a choice the grammar always takes the same, so that the English determines the German:

- simple past and present perfect are both the German perfect; had and was are hatte and war;
- the middle field is: reflexive, pronouns, definite objects, frequency, time, nicht, indefinite
  dative, manner, place, indefinite object, prepositional object, predicate or direction; but where
  there is a dative the accusative follows the time;
- not is kein on an indefinite object and nicht everywhere else; you is du.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from demo_lexicon import NUMBERS, Adjective, Name, Noun
from demo_verbs import Phrase, Verb

NOTHING = Phrase("", "")

# Rows: case; columns: masculine, feminine, neuter, plural.
DEFINITE = {"n": "der die das die", "a": "den die das die", "d": "dem der dem den"}
STRONG = {"n": "er e es e", "a": "en e es e", "d": "em er em en"}
WEAK = {"n": "e e e en", "a": "en e e en", "d": "en en en en"}
EIN = {"n": "- e - e", "a": "en e - e", "d": "em er em en"}
MIXED = {"n": "er e es en", "a": "en e es en", "d": "en en en en"}

# Person and number: English subject, object, possessive; then German nominative, accusative,
# dative, reflexive.
PRONOUNS = {
    "1s": "I me my ich mich mir mich",
    "2s": "you you your du dich dir dich",
    "3sm": "he him his er ihn ihm sich",
    "3sf": "she her her sie sie ihr sich",
    # it, by the gender of the German noun that it takes up
    "3im": "it it its er ihn ihm sich",
    "3if": "it it its sie sie ihr sich",
    "3in": "it it its es es ihm sich",
    "1p": "we us our wir uns uns uns",
    "3p": "they them their sie sie ihnen sich",
}
POSSESSIVES = {
    "my": "mein", "your": "dein", "his": "sein", "her": "ihr", "our": "unser", "their": "ihr"
}  # fmt: skip

CONTRACTIONS = {
    "in das": "ins", "in dem": "im", "an das": "ans", "an dem": "am", "von dem": "vom",
    "zu dem": "zum", "zu der": "zur", "bei dem": "beim",
}  # fmt: skip

BE = {"pres": {"1s": "am", "3s": "is", "": "are"}, "past": {"1s": "was", "3s": "was", "": "were"}}
SEIN = {
    "pres": {"1s": "bin", "2s": "bist", "3s": "ist", "": "sind"},
    "past": {"1s": "war", "2s": "warst", "3s": "war", "": "waren"},
}
HABEN = {
    "pres": {"1s": "habe", "2s": "hast", "3s": "hat", "": "haben"},
    "past": {"1s": "hatte", "2s": "hattest", "3s": "hatte", "": "hatten"},
}
WERDEN = {"1s": "werde", "2s": "wirst", "3s": "wird", "": "werden"}

# English present, past; German present I, you, he, they; past stem.  A plus stands before English
# forms that need do.
MODALS = {
    "can": "can could kann kannst kann können konnte",
    "must": "must - muss musst muss müssen -",
    "should": "should - sollte solltest sollte sollten -",
    "may": "may - darf darfst darf dürfen -",
    "want": "+want +wanted will willst will wollen wollte",
    "have": "+have +had muss musst muss müssen musste",
    "would like": "would_like - möchte möchtest möchte möchten -",
}
VOWELS = "aeiou"
DOUBLED = {"run", "swim", "get", "shop", "put", "forget", "sit", "travel", "log"}


@dataclass(frozen=True)
class NP:
    """A noun phrase: a pronoun (`pronoun`), a name (`name`) or a noun with a determiner.

    `det` is one of def, indef, this, which, bare, no, many, a possessive (my), a number (3) or the
    name of an owner followed by 's.
    """

    det: str = ""
    noun: Noun | None = None
    adj: Adjective | None = None
    plural: bool = False
    name: Name | None = None
    pronoun: str = ""

    @property
    def agreement(self) -> str:
        """Person and number as the verb tables spell it: 1s, 2s, 3s or "" for any plural."""
        if self.pronoun:
            return "" if self.pronoun.endswith("p") else self.pronoun[:2].replace("i", "s")
        return "" if self.plural else "3s"

    @property
    def gender(self) -> str:
        """The grammatical gender: m, f or n."""
        if self.pronoun:
            return self.pronoun[2:]
        owner = self.name or self.noun
        assert owner is not None
        return owner.gender

    @property
    def definite(self) -> bool:
        """Whether the phrase stands before the time in the German middle field."""
        return not (self.det in ("indef", "bare", "no", "many") or self.det.isdigit())

    @property
    def negatable(self) -> bool:
        """Whether a negation becomes kein on this phrase."""
        return self.det in ("indef", "bare")


def person(code: str) -> NP:
    """The pronoun for a person and number code of PRONOUNS."""
    return NP(pronoun=code)


def _cell(table: dict[str, str], case: str, np: NP) -> str:
    column = 3 if np.plural else "mfn".index(np.gender)
    ending = table[case].split()[column]
    return "" if ending == "-" else ending


def np_english(np: NP, subject: bool = False) -> str:
    """Spell a noun phrase in English."""
    if np.pronoun:
        return PRONOUNS[np.pronoun].split()[0 if subject else 1]
    if np.name:
        return np.name.en
    assert np.noun is not None
    words = [np.adj.en] if np.adj else []
    words.append(np.noun.en_pl if np.plural else np.noun.en)
    if np.det == "indef" and not np.plural:
        article = "an" if words[0][0] in VOWELS else "a"
    elif np.det.isdigit():
        article = NUMBERS[int(np.det)][0]
    else:
        fixed = {"def": "the", "this": "these" if np.plural else "this", "indef": "", "bare": ""}
        article = fixed.get(np.det, np.det)
    return " ".join(filter(None, [article, *words]))


def _noun_german(np: NP, case: str) -> str:
    noun = np.noun
    assert noun is not None
    if not np.plural:
        return noun.de_pl if noun.weak and case != "n" else noun.de
    # The dative plural adds -n unless the plural ends in -n or -s.
    return noun.de_pl + ("n" if case == "d" and noun.de_pl[-1] not in "ns" else "")


def _determiner(np: NP, case: str, negated: bool) -> tuple[str, dict[str, str]]:
    """The German determiner and the table of the endings an adjective takes after it."""
    strong = {"this": "dies", "every": "jed", "which": "welch"}
    if np.det == "def":
        return _cell(DEFINITE, case, np), WEAK
    if np.det in strong:
        return strong[np.det] + _cell(STRONG, case, np), WEAK
    if negated and np.negatable:
        return "kein" + _cell(EIN, case, np), MIXED
    if np.det == "no":
        return "kein" + _cell(EIN, case, np), MIXED
    if np.det in POSSESSIVES:
        stem, ending = POSSESSIVES[np.det], _cell(EIN, case, np)
        # unser loses its e before an ending in speech only; the full form is the written norm.
        return stem + ending, MIXED
    if np.det == "indef" and not np.plural:
        return "ein" + _cell(EIN, case, np), MIXED
    if np.det.isdigit():
        return NUMBERS[int(np.det)][1], STRONG
    if np.det.endswith("'s"):
        return np.det[:-2] + "s", STRONG
    return {"many": "viele"}.get(np.det, ""), STRONG


def np_german(np: NP, case: str, negated: bool = False) -> str:
    """Spell a noun phrase in German; `case` is n, a or d."""
    if np.pronoun:
        return PRONOUNS[np.pronoun].split()["nad".index(case) + 3]
    if np.name:
        title, _, rest = np.name.de.partition(" ")
        return f"Herrn {rest}" if title == "Herr" and case != "n" else np.name.de
    determiner, endings = _determiner(np, case, negated)
    adjective = np.adj.stem + _cell(endings, case, np) if np.adj else ""
    return " ".join(filter(None, [determiner, adjective, _noun_german(np, case)]))


def contracted(preposition: str, phrase: str) -> str:
    """A German preposition before a phrase, contracted wherever written German contracts."""
    first, space, rest = phrase.partition(" ")
    both = f"{preposition} {first}"
    # Before a relative clause or alone der, dem and das are pronouns and stay as they are.
    return CONTRACTIONS.get(both, both) + space + rest if space else f"{preposition} {phrase}"


def third_singular(verb: str) -> str:
    """The English third person singular of the first word of `verb`."""
    word, space, rest = verb.partition(" ")
    if word == "have":
        word = "has"
    elif word.endswith(("s", "sh", "ch", "x", "o")):
        word += "es"
    elif word.endswith("y") and word[-2] not in VOWELS:
        word = word[:-1] + "ies"
    else:
        word += "s"
    return word + space + rest


def ing(verb: str) -> str:
    """The English present participle of the first word of `verb`."""
    word, space, rest = verb.partition(" ")
    if word in DOUBLED:
        word += word[-1]
    elif word == "lie":
        word = "ly"
    elif word.endswith("e") and not word.endswith("ee"):
        word = word[:-1]
    return f"{word}ing{space}{rest}"


def german_present(verb: Verb, agreement: str) -> str:
    """The German present without the separable prefix."""
    if verb.de == "haben":
        return HABEN["pres"][agreement]
    if agreement == "":
        return verb.de
    if agreement == "3s":
        return verb.de_third
    if agreement == "1s":
        if verb.de.endswith("eln"):
            return verb.de[:-3] + "le"
        return verb.de.removesuffix("n").removesuffix("e") + "e"
    stem = verb.de_third.removesuffix("t")
    return stem + ("t" if stem[-1] in "sßz" else "st")


def zu_infinitive(verb: Verb) -> str:
    """The infinitive with zu, which stands after a separable prefix."""
    return f"{verb.prefix}zu{verb.de}" if verb.prefix else f"zu {verb.de}"


@dataclass(frozen=True)
class Clause:
    """What a clause means: who does what, when, how and where."""

    subj: NP
    verb: Verb
    tense: str = "pres"  # pres, prog, past, perf or fut
    modal: str = ""  # a key of MODALS, with tense pres or past
    neg: bool = False
    acc: NP | None = None
    dat: NP | None = None
    prep: NP | None = None
    time: Phrase = NOTHING
    freq: Phrase = NOTHING
    already: bool = False  # already, or not yet where negated
    gern: bool = False  # like to do
    manner: Phrase = NOTHING
    place: Phrase = NOTHING
    pred: Phrase = NOTHING  # predicate, direction or spot

    def nouns(self) -> list[str]:
        """The English singulars of the nouns that are objects of this verb."""
        arguments = [self.acc, self.dat, self.prep]
        return [np.noun.en for np in arguments if np is not None and np.noun is not None]


def negated(c: Clause) -> Clause:
    """The clause denied: only an accusative object may be indefinite, which makes it kein."""
    changes: dict[str, NP] = {}
    for role, np in (("dat", c.dat), ("prep", c.prep)):
        if np and not np.definite:
            changes[role] = replace(np, det="def")
    if c.acc and c.acc.det.isdigit():
        changes["acc"] = replace(c.acc, det="def")
    if c.acc and c.acc.negatable and c.already:
        changes["acc"] = replace(c.acc, det="def")
    return replace(c, neg=True, freq=NOTHING, **changes)  # type: ignore[arg-type]


def _english_head(c: Clause) -> tuple[str, str, str]:
    """The auxiliary ("" for none), the finite main verb and what of the verb follows it."""
    agreement = c.subj.agreement
    third = agreement == "3s"
    base = c.verb.en
    if c.gern:
        return "", "likes" if third else "like", f"to {base}"
    if c.modal:
        present, past, *_ = MODALS[c.modal].split()
        form = past if c.tense == "past" else present
        if not form.startswith("+"):
            aux, _, rest = form.partition("_")
            return aux, "", f"{rest} to {base}".strip() if rest else base
        form = form[1:]
        return "", third_singular(form) if third and c.tense != "past" else form, f"to {base}"
    if base == "be":
        forms = BE["past" if c.tense == "past" else "pres"]
        return forms.get(agreement, forms[""]), "", ""
    if c.tense == "prog":
        return BE["pres"].get(agreement, "are"), "", ing(base)
    if c.tense == "perf":
        return "has" if third else "have", "", c.verb.participle
    if c.tense == "fut":
        return "will", "", base
    if c.tense == "past":
        return "", c.verb.past, ""
    return "", third_singular(base) if third else base, ""


def _do_support(c: Clause, main: str, rest: str) -> tuple[str, str]:
    """The form of do, and the main verb put back to its base."""
    present = "does" if c.subj.agreement == "3s" else "do"
    aux = "did" if c.tense == "past" else present
    if rest.startswith("to "):
        return aux, f"{'like' if c.gern else c.modal} {rest}"
    return aux, c.verb.en


def english_objects(c: Clause) -> str:
    """Everything after the verb in English, without the time."""
    words: list[str] = []
    acc = np_english(c.acc) if c.acc else ""
    if c.verb.particle and c.acc and c.acc.pronoun:
        words += [acc, c.verb.particle]
    elif c.dat and c.acc:
        dative = np_english(c.dat)
        late = c.acc.pronoun or c.verb.en in ("explain", "recommend")
        words += [acc, "to", dative] if late else [dative, acc]
    else:
        words += [c.verb.particle, acc, np_english(c.dat) if c.dat else ""]
    if c.prep:
        words += [c.verb.prep.en, np_english(c.prep)]
    words += [c.pred.en, c.manner.en, c.place.en, c.time.en, "yet" if c.already and c.neg else ""]
    return " ".join(filter(None, words))


def english(c: Clause, order: str = "main", front: str = "") -> str:
    """Spell a clause in English; `order` is main or question, `front` goes before everything."""
    aux, main, rest = _english_head(c)
    if not aux and (c.neg or order == "question"):
        aux, rest = _do_support(c, main, rest)
        main = ""
    subject = np_english(c.subj, subject=True)
    middle = ["not" if c.neg else "", c.freq.en, "already" if c.already and not c.neg else ""]
    if aux == "can" and c.neg:
        aux, middle[0] = ("can", "not") if order == "question" else ("cannot", "")
    head = [aux, subject] if order == "question" else [subject, aux]
    words = [front, *head, *middle, main, rest, english_objects(c)]
    return " ".join(filter(None, words))


def _german_head(c: Clause) -> tuple[str, str]:
    """The finite verb and what closes the clause (prefix, participle or infinitive)."""
    agreement = c.subj.agreement
    infinitive = c.verb.prefix + c.verb.de
    if c.modal:
        # What one must not do one darf nicht tun; muss nicht is does not have to.
        modal = "may" if c.modal == "must" and c.neg else c.modal
        _, _, ich, du, er, wir, past = MODALS[modal].split()
        if c.tense == "past":
            return past + {"2s": "st", "": "n"}.get(agreement, ""), infinitive
        return {"1s": ich, "2s": du, "3s": er, "": wir}[agreement], infinitive
    if c.verb.en == "be":
        return SEIN["past" if c.tense == "past" else "pres"][agreement], ""
    if c.tense == "past" and c.verb.en == "have":
        return HABEN["past"][agreement], ""
    if c.tense == "fut":
        return WERDEN[agreement], infinitive
    if c.tense in ("past", "perf"):
        aux = SEIN if c.verb.aux == "s" else HABEN
        return aux["pres"][agreement], c.verb.de_participle
    return german_present(c.verb, agreement), c.verb.prefix


def _object(c: Clause, role: str, definite: bool) -> str:
    """The dative (d) or accusative (a) object if it is (not) definite; not for pronouns."""
    np = c.dat if role == "d" else c.acc
    if np is None or np.pronoun or np.definite != definite:
        return ""
    return np_german(np, role, negated=c.neg and role == "a")


def german_middle(c: Clause) -> list[str]:
    """The German middle field after the subject and a reflexive pronoun."""
    roles = ((c.acc, "a"), (c.dat, "d"))
    pronouns = [np_german(np, case) for np, case in roles if np and np.pronoun]
    absorbed = c.acc is not None and c.acc.negatable
    if c.already:
        particle = "noch nicht" if c.neg else "schon"
    else:
        particle = "nicht" if c.neg and not absorbed else ""
    gern = "gern" if c.gern else ""
    prep = contracted(c.verb.prep.de, np_german(c.prep, c.verb.prep_case)) if c.prep else ""
    thing, when = _object(c, "a", True), [c.freq.de, c.time.de]
    # Beside a dative the thing is what is told, and follows the time; alone it goes before it.
    told = [*when, thing] if c.dat else [thing, *when]
    return [
        *pronouns, _object(c, "d", True), *told, gern, particle, _object(c, "d", False),
        c.manner.de, c.place.de, _object(c, "a", False), prep, c.pred.de,
    ]  # fmt: skip


def german(c: Clause, order: str = "main", front: str = "") -> str:
    """Spell a clause in German.

    `order` is main (verb second, after `front` if there is one), question (verb first, after
    `front`) or final (verb last).
    """
    finite, end = _german_head(c)
    subject = np_german(c.subj, "n")
    reflexive = _reflexive(c)
    middle = german_middle(c)
    if order == "final":
        closing = end + finite if end and end == c.verb.prefix else f"{end} {finite}"
        words = [front, subject, reflexive, *middle, closing.strip()]
    elif order == "main" and not front:
        words = [subject, finite, reflexive, *middle, end]
    else:
        # After the verb a reflexive pronoun goes before a noun, but after a pronoun.
        inner = [subject, reflexive] if c.subj.pronoun else [reflexive, subject]
        words = [front, finite, *inner, *middle, end]
    return " ".join(filter(None, words))


def _reflexive(c: Clause) -> str:
    if not c.verb.reflexive:
        return ""
    return PRONOUNS[c.subj.pronoun or "3p"].split()[6]


def imperative(c: Clause, please: bool) -> Phrase:
    """Both languages' command to one person; `c.subj` is you."""
    aux = "do not" if c.neg else ""
    en = " ".join(filter(None, ["please" if please else "", aux, c.verb.en, english_objects(c)]))
    bare = replace(c, subj=person("2s"))
    words = ["bitte" if please else "", c.verb.imperative, _reflexive(bare)]
    de = " ".join(filter(None, [*words, *german_middle(bare), c.verb.prefix]))
    return Phrase(en, de)


def to_infinitive(c: Clause) -> Phrase:
    """The clause as an infinitive: to read the book; das Buch zu lesen."""
    en = " ".join(filter(None, ["not" if c.neg else "", "to", c.verb.en, english_objects(c)]))
    de = " ".join(filter(None, [_reflexive(c), *german_middle(c), zu_infinitive(c.verb)]))
    return Phrase(en, de)
