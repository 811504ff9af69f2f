"""A second domain for the demo corpus: what people do with programs, files and servers.

Names, pronouns, times, grammar and most patterns are those of the demo corpus; nouns, adjectives
and verbs are other ones, in the form of its tables. Seven English words are known there with
another German: table (here Tabelle, there Tisch), key (Taste, Schlüssel), letter (Buchstabe,
Brief), open (öffnen, aufmachen), close (schließen, zumachen), run (ausführen, laufen) and show
(anzeigen, zeigen). The words beside them tell which is meant, so that the English determines the
German in both corpora taken together.
"""

from __future__ import annotations

from dataclasses import replace

from demo_build import (
    ABSOLUTE,
    FORGET,
    IF,
    TRY,
    Draft,
    after_sub,
    be,
    draft,
    main_clause,
    pair,
    sub_clause,
    the_pronoun,
    with_sub,
)
from demo_complex import that_clause
from demo_grammar import NP, Clause, english, german, person, to_infinitive
from demo_lexicon import read_adjectives, read_nouns
from demo_questions import command, object_question, yes_no
from demo_sampler import Sampler
from demo_statements import already, describable, fronted, giving, modal, negation, statement
from demo_verbs import Phrase, Verb, read_verbs

NOUNS = """
customer/customers Kunde/Kunden mw person adult prof
programmer/programmers Programmierer/Programmierer m person adult prof
developer/developers Entwickler/Entwickler m person adult prof
administrator/administrators Administrator/Administratoren m person adult prof
technician/technicians Techniker/Techniker m person adult prof
program/programs Programm/Programme n machine soft opened
browser/browsers Browser/Browser m machine soft opened
app/apps App/Apps f machine soft opened
server/servers Server/Server m machine device
printer/printers Drucker/Drucker m device
keyboard/keyboards Tastatur/Tastaturen f device
file/files Datei/Dateien f item opened written
folder/folders Ordner/Ordner m item opened
document/documents Dokument/Dokumente n item opened written
attachment/attachments Anhang/Anhänge m item opened written
archive/archives Archiv/Archive n item opened
backup/backups Sicherungskopie/Sicherungskopien f item
table/tables Tabelle/Tabellen f sheet opened written
column/columns Spalte/Spalten f cells
row/rows Zeile/Zeilen f cells
cell/cells Zelle/Zellen f cells
letter/letters Buchstabe/Buchstaben mw sign
digit/digits Ziffer/Ziffern f sign
key/keys Taste/Tasten f pressed
button/buttons Schaltfläche/Schaltflächen f pressed clicked
link/links Link/Links m clicked
menu/menus Menü/Menüs n clicked opened
icon/icons Symbol/Symbole n clicked
password/passwords Passwort/Passwörter n secret
account/accounts Konto/Konten n account
setting/settings Einstellung/Einstellungen f setting
update/updates Aktualisierung/Aktualisierungen f issue
version/versions Version/Versionen f issue
certificate/certificates Zertifikat/Zertifikate n certificate
error/errors Fehler/Fehler m error
query/queries Abfrage/Abfragen f query
database/databases Datenbank/Datenbanken f store
drive/drives Laufwerk/Laufwerke n store
disk/disks Festplatte/Festplatten f store
connection/connections Verbindung/Verbindungen f line
network/networks Netzwerk/Netzwerke n line
entry/entries Eintrag/Einträge m entry
field/fields Feld/Felder n entry
page/pages Seite/Seiten f page
"""

ADJECTIVES = """
damaged beschädigt beschädigt - - item store sheet
encrypted verschlüsselt verschlüsselt - - item store line
hidden versteckt versteckt - - item cells entry sheet
empty leer leer - - folder cell field page sheet
new neu neu newer neuer soft device issue account page
old alt alt older älter soft device backup
big groß groß bigger größer file folder database disk
unknown unbekannt unbekannt - - error
secure sicher sicher - - line secret
public öffentlich öffentlich - - folder page network
free kostenlos kostenlos - - soft
available verfügbar verfügbar - - issue server
current aktuell aktuell - - issue page entry certificate
wrong falsch falsch - - secret entry sign pressed
important wichtig wichtig - - written setting issue
faulty fehlerhaft fehlerhaft - - query disk keyboard
"""

VERBS = """
open opened opened | öffnen öffnet geöffnet h öffne | t | person machine | opened
close closed closed | schließen schließt geschlossen h schließ | t | person machine | opened line
save saved saved | speichern speichert gespeichert h speichere | t | person machine | written
    setting query
delete deleted deleted | löschen löscht gelöscht h lösch | t | person machine | item sheet cells
    entry account query certificate
copy copied copied | kopieren kopiert kopiert h kopiere | t | person machine | item sheet cells
    entry
rename renamed renamed | um+benennen benennt umbenannt h benenne | t | person | item sheet drive
move moved moved | verschieben verschiebt verschoben h verschieb | t | person | item icon cells
download downloaded downloaded | herunter+laden lädt heruntergeladen h lad | t | person machine |
    item issue app
upload uploaded uploaded | hoch+laden lädt hochgeladen h lad | t | person | item certificate
install installed installed | installieren installiert installiert h installiere | t | person | soft
    issue certificate printer
start started started | starten startet gestartet h starte | t | person machine | soft server query
run ran run | aus+führen führt ausgeführt h führ | t | person machine | program query
encrypt encrypted encrypted | verschlüsseln verschlüsselt verschlüsselt h verschlüssle | t |
    person machine | item store line
check checked checked | überprüfen überprüft überprüft h überprüf | t | person machine | setting
    line entry certificate store secret
update updated updated | aktualisieren aktualisiert aktualisiert h aktualisiere | t | person machine
    | soft database page certificate sheet
print printed printed | drucken druckt gedruckt h druck | t | person | written page
press pressed pressed | drücken drückt gedrückt h drück | t | person | pressed
enter entered entered | ein+geben gibt eingegeben h gib | t | person | sign secret
select selected selected | aus+wählen wählt ausgewählt h wähl | t | person | item sheet cells entry
    printer
insert inserted inserted | ein+fügen fügt eingefügt h füg | t | person | cells sign link icon
lock locked locked | sperren sperrt gesperrt h sperr | t | person machine | account page cells
create created created | erstellen erstellt erstellt h erstell | t | person machine | folder
    document sheet account backup query archive
change changed changed | ändern ändert geändert h ändere | t | person | setting secret entry
test tested tested | testen testet getestet h teste | t | person | soft query line version
search searched searched | durchsuchen durchsucht durchsucht h durchsuch | t | person machine |
    folder archive store
show showed shown | an+zeigen zeigt angezeigt h zeig | t | machine | error sheet page entry |
    stative
send sent sent | schicken schickt geschickt h schick | dt | person | item link secret
forward forwarded forwarded | weiter+leiten leitet weitergeleitet h leite | dt | person | written
    link
click clicked clicked | klicken klickt geklickt h klick | p:on:auf:a | person | clicked
access accessed accessed | zu+greifen greift zugegriffen h greif | p::auf:a | person machine | store
    item server
log_in logged_in logged_in | *an+melden meldet angemeldet h melde | i | person | |
log_out logged_out logged_out | *ab+melden meldet abgemeldet h melde | i | person | |
crash crashed crashed | ab+stürzen stürzt abgestürzt s stürz | i | machine | | stative
"""
BEFORE, AS_SOON_AS = Phrase("before", "bevor"), Phrase("as soon as", "sobald")


class SoftwareSampler(Sampler):
    """Draws from the words of this domain, with the names and times of the demo corpus."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.nouns = read_nouns(NOUNS)
        self.adjectives = tuple(read_adjectives(ADJECTIVES).values())
        self.verbs = read_verbs(VERBS)
        self.manners = {}

    def clause(self, frames: str = "t t t t dt p i", **fixed: object) -> Clause:
        """A clause with one of those frames that a verb of the domain has."""
        there = {verb.frame for verb in self.verbs.values()}
        return super().clause(" ".join(f for f in frames.split() if f in there), **fixed)

    def done_to(self, subj: NP, *tenses: str) -> Clause:
        """Something that a person does to a thing."""
        return self.objects(Clause(subj, self._worked(), self.pick(tenses)), 0.15)

    def _worked(self) -> Verb:
        return self.pick([v for v in self.verbs.values() if v.frame == "t" and v.en != "show"])


def condition(s: Sampler) -> Draft:
    """What is so with a thing: Die Datei ist verschlüsselt."""
    noun = describable(s)
    np = s.noun_np(noun, "def def this poss", 0.0)
    adj = s.pick([adj for adj in s.adjectives if adj.tags & noun.tags])
    said = Phrase(adj.en, adj.de)
    if adj.en not in ABSOLUTE and s.chance(0.2):
        said = Phrase(f"very {adj.en}", f"sehr {adj.de}")
    return draft(*pair(main_clause(be(np, said, s.choose("pres pres past"), s.chance(0.15)))))


def before(s: SoftwareSampler) -> Draft:
    """bevor and sobald: Bevor du das Programm schließt, musst du die Datei speichern."""
    subj = s.somebody()
    who = the_pronoun(subj)
    first = s.chance(0.5)
    modal = s.choose("must should can have")
    conjunction = s.pick((BEFORE, BEFORE, AS_SOON_AS))
    begun, done = (subj, who) if first else (who, subj)
    sub = sub_clause(s.done_to(begun, "pres"), conjunction)
    c = replace(s.done_to(done, "pres"), modal=modal)
    return draft(*pair(after_sub(sub, c) if first else with_sub(c, sub)), c)


def mishap(s: SoftwareSampler) -> Draft:
    """wenn: Wenn der Server abstürzt, musst du die Verbindung überprüfen."""
    machine = s.noun_np(s.pick(s.nouns_with(frozenset({"machine"}))), "def def this", 0.1)
    sub = sub_clause(Clause(machine, s.verbs["crash"], "pres"), IF)
    c = s.done_to(person(s.choose("1s 2s 2s 1p 3p")), "pres")
    c = replace(c, modal=s.choose("must must should can"))
    return draft(*pair(after_sub(sub, c) if s.chance(0.5) else with_sub(c, sub)), c)


def aim(s: SoftwareSampler) -> Draft:
    """um zu: Ich habe die Taste gedrückt, um den Ordner zu öffnen."""
    subj = s.subject(frozenset({"person"}))
    means = s.one_of("press,click,enter,start,install,open,run")
    c = s.objects(Clause(subj, means, s.choose("past fut prog")), 0.15)
    for_this = s.objects(Clause(subj, s.one_of("log in,log out")), 0.0)
    if s.chance(0.7):
        for_this = s.done_to(subj, "pres")
    inf = to_infinitive(for_this)
    return draft(f"{english(c)} {inf.en}", f"{german(c)}, um {inf.de}", c, for_this)


def attempt(s: SoftwareSampler) -> Draft:
    """zu: Anna hat vergessen, das Dokument zu speichern."""
    subj = s.subject(frozenset({"person"}))
    matrix = s.pick((Clause(subj, TRY, "past"), Clause(subj, FORGET, s.choose("past fut"))))
    c = s.done_to(subj, "pres")
    inf = to_infinitive(c)
    return draft(f"{english(matrix)} {inf.en}", f"{german(matrix)}, {inf.de}", c)


PATTERNS = (
    (13, statement), (8, fronted), (8, negation), (4, already), (10, modal), (3, giving),
    (8, yes_no), (6, object_question), (7, command), (6, that_clause), (6, condition), (6, before),
    (4, mishap), (5, aim), (4, attempt),
)  # fmt: skip
