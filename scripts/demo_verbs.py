"""The hand-written verbs, places and times of the demo corpus.

A verb reads: English base, past, participle | German infinitive (a plus after a separable prefix, a
star before a reflexive verb), third person, participle, auxiliary (h or s), imperative | frame |
subject tags | object tags | flags.  An indented line goes on with the line before.

Frames say what a verb needs: `i` nothing, `t` an accusative object, `d` a dative object, `dt` both,
`p:for:auf:a` a prepositional object (English and German preposition, German case), `spot` an object
and where it is put, `rest` where it is, `seat` where one sits down.  A plus in the English base
marks a particle that a pronoun object steps in front of (turn it on).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phrase:
    """A fixed phrase in both languages."""

    en: str
    de: str


@dataclass(frozen=True)
class Verb:
    """A verb with its principal parts and what it takes."""

    en: str
    particle: str  # English particle, "" where there is none
    past: str
    participle: str
    de: str  # German infinitive without the separable prefix
    prefix: str  # German separable prefix, "" where there is none
    de_third: str
    de_participle: str
    aux: str  # h (haben) or s (sein)
    imperative: str
    frame: str
    prep: Phrase  # prepositions of a prepositional object
    prep_case: str
    subjects: frozenset[str]
    objects: frozenset[str]
    reflexive: bool
    flags: frozenset[str]  # stative: no progressive; plus the groups of its places


# Flags: `stative` takes no progressive; `at=` and `to=` name groups of places; `need` wants one.
VERBS = """
eat ate eaten | essen isst gegessen h iss | t | person | food foodmass | at=meal
drink drank drunk | trinken trinkt getrunken h trink | t | person | drink | at=meal
read read read | lesen liest gelesen h lies | t | person | read | at=rest
write wrote written | schreiben schreibt geschrieben h schreib | t | person | post poem story |
    at=desk
buy bought bought | kaufen kauft gekauft h kauf | t | person | food foodmass spread drink cloth
    pair furn dev lend vessel cutlery gift pretty toy ticket pencil umbrella suitcase bag
    newspaper postcard private camera home inst |
sell sold sold | verkaufen verkauft verkauft h verkauf | t | person | private home furn inst
    camera art dev cow horse pig computer book |
see saw seen | sehen sieht gesehen h sieh | t | person | person animal building show tree bus
    train | stative
look_for looked_for looked_for | suchen sucht gesucht h such | t | person | small lose thin own
    pet cutlery pair home |
find found found | finden findet gefunden h find | t | person | small lose thin own pet money |
    stative
visit visited visited | besuchen besucht besucht h besuch | t | person | kin visit museum name |
love loved loved | lieben liebt geliebt h lieb | t | person | kin pet music child name | stative
need needed needed | brauchen braucht gebraucht h brauch | t | person | small own thin cutlery
    vessel money dev private furn home taxi doctor | stative
open opened opened | auf+machen macht aufgemacht h mach | t | person | lid |
close closed closed | zu+machen macht zugemacht h mach | t | person | lid |
turn+on turned turned | ein+schalten schaltet eingeschaltet h schalt | t | person | dev light |
turn+off turned turned | aus+schalten schaltet ausgeschaltet h schalt | t | person | dev light |
call called called | an+rufen ruft angerufen h ruf | t | person | kin doctor name |
invite invited invited | ein+laden lädt eingeladen h lad | t | person | kin name teacher |
pick+up picked picked | ab+holen holt abgeholt h hol | t | adult | kin child guest tourist name |
put+on put put | an+ziehen zieht angezogen h zieh | t | person | cloth pair |
take+off took taken | aus+ziehen zieht ausgezogen h zieh | t | person | cloth pair |
wash washed washed | waschen wäscht gewaschen h wasch | t | person | cloth private vegetable apple
    |
clean cleaned cleaned | putzen putzt geputzt h putz | t | person | window mirror pair room bicycle
    |
repair repaired repaired | reparieren repariert repariert h repariere | t | adult | repair private
    lamp chair |
cook cooked cooked | kochen kocht gekocht h koch | t | person | hot hotmass | at=kitchen
bake baked baked | backen backt gebacken h back | t | person | baked bakedmass | at=kitchen
paint painted painted | malen malt gemalt h mal | t | person | tree flower animal picture house |
learn learned learned | lernen lernt gelernt h lern | t | person | language poem song word rule |
speak spoke spoken | sprechen spricht gesprochen h sprich | t | person | language | stative
understand understood understood | verstehen versteht verstanden h versteh | t | person | abstract
    poem film story letter name kin | stative
ask asked asked | fragen fragt gefragt h frag | t | person | kin prof name |
answer answered answered | beantworten beantwortet beantwortet h beantworte | t | person |
    question letter message |
sing sang sung | singen singt gesungen h sing | t | person | song | at=rest
forget forgot forgotten | vergessen vergisst vergessen h vergiss | t | person | lose own word rule
    present | stative
lose lost lost | verlieren verliert verloren h verlier | t | person | lose money ball bag |
    stative
carry carried carried | tragen trägt getragen h trag | t | person | carry |
wear wore worn | tragen trägt getragen h trag | t | person | cloth pair |
feed fed fed | füttern füttert gefüttert h füttere | t | person | pet farm baby |
pay paid paid | bezahlen bezahlt bezahlt h bezahl | t | adult | bill |
order ordered ordered | bestellen bestellt bestellt h bestell | t | person | dish drink taxi |
meet met met | treffen trifft getroffen h triff | t | person | kin prof tourist name |
know knew known | kennen kennt gekannt h kenn | t | person | kin place song story name hotel
    restaurant poem | stative
throw+away threw thrown | weg+werfen wirft weggeworfen h wirf | t | person | newspaper letter
    bottle pair box cap postcard ticket chair sofa |
bring+along brought brought | mit+bringen bringt mitgebracht h bring | t | person | dish drink
    present flower umbrella camera ball guitar friend sister book |
take+along took taken | mit+nehmen nimmt mitgenommen h nimm | t | person | own small passport
    money dog jacket ticket newspaper |
tidy+up tidied tidied | auf+räumen räumt aufgeräumt h räum | t | person | room cupboard desk house
    flat |
try+on tried tried | an+probieren probiert anprobiert h probier | t | person | cloth pair |
miss missed missed | verpassen verpasst verpasst h verpass | t | person | public | stative
take took taken | nehmen nimmt genommen h nimm | t | person | public taxi umbrella key |
photograph photographed photographed | fotografieren fotografiert fotografiert h fotografiere | t
    | person | animal building flower tree kin name baby |
translate translated translated | übersetzen übersetzt übersetzt h übersetze | t | adult | letter
    poem sentence book message story word |
have had had | haben hat gehabt h hab | t | person | many pet private home small own inst computer
    question problem | stative
help helped helped | helfen hilft geholfen h hilf | d | person | kin prof child tourist name
    someone |
thank thanked thanked | danken dankt gedankt h danke | d | person | kin prof name |
follow followed followed | folgen folgt gefolgt s folge | d | person | bus car dog someone prof
    name |
listen_to listened_to listened_to | zu+hören hört zugehört h hör | d | person | kin prof name |
belong_to belonged_to belonged_to | gehören gehört gehört h gehör | d | private home small inst
    pet | kin prof name | stative
give gave given | geben gibt gegeben h gib | dt | person | small lend thin gift fruit cup glass
    bottle money |
show showed shown | zeigen zeigt gezeigt h zeig | dt | person | art book map room home key
    passport ticket garden letter way ring |
send sent sent | schicken schickt geschickt h schick | dt | person | post present photo book
    picture money |
bring brought brought | bringen bringt gebracht h bring | dt | person | drink dish cup glass
    newspaper present flower key bill letter |
lend lent lent | leihen leiht geliehen h leih | dt | person | lend private umbrella money knife |
explain explained explained | erklären erklärt erklärt h erkläre | dt | person | hard word
    sentence |
recommend recommended recommended | empfehlen empfiehlt empfohlen h empfiehl | dt | person | hotel
    restaurant film book museum novel |
tell told told | erzählen erzählt erzählt h erzähl | dt | person | tell |
wait waited waited | warten wartet gewartet h warte | p:for:auf:a | person | public kin doctor
    taxi letter name someone | at=wait
think thought thought | denken denkt gedacht h denk | p:of:an:a | person | kin trip exercise name
    weekend |
talk talked talked | sprechen spricht gesprochen h sprich | p:to:mit:d | person | kin prof someone
    name | at=meal
dream dreamed dreamed | träumen träumt geträumt h träum | p:of:von:d | person | trip house horse
    bicycle weekend castle |
laugh laughed laughed | lachen lacht gelacht h lach | p:about:über:a | person | story film monkey
    photo doll |
look_forward looked_forward looked_forward | *freuen freut gefreut h freu | p:to:auf:a | person |
    event weekend |
remember remembered remembered | *erinnern erinnert erinnert h erinnere | p::an:a | person | kin
    trip story name song concert | stative
play played played | spielen spielt gespielt h spiel | p:with:mit:d | young | pet toy kin name
    child | at=play
sleep slept slept | schlafen schläft geschlafen h schlaf | i | person pet | | at=sleep
work worked worked | arbeiten arbeitet gearbeitet h arbeite | i | adult | | at=work
swim swam swum | schwimmen schwimmt geschwommen s schwimm | i | person | | at=swim
dance danced danced | tanzen tanzt getanzt h tanz | i | person | | at=party
cry cried cried | weinen weint geweint h wein | i | young | | at=home
get_up got_up got_up | auf+stehen steht aufgestanden s steh | i | person | |
wake_up woke_up woken_up | auf+wachen wacht aufgewacht s wach | i | person | | stative
fall_asleep fell_asleep fallen_asleep | ein+schlafen schläft eingeschlafen s schlaf | i | person
    pet | | stative at=doze
arrive arrived arrived | an+kommen kommt angekommen s komm | i | public guest kin | | stative
come_back came_back come_back | zurück+kommen kommt zurückgekommen s komm | i | person | | stative
come_along came_along come_along | mit+kommen kommt mitgekommen s komm | i | person | | stative
watch_TV watched_TV watched_TV | fern+sehen sieht ferngesehen h sieh | i | person | | at=tv
shop shopped shopped | ein+kaufen kauft eingekauft h kauf | i | adult | | at=shop
hurry hurried hurried | *beeilen beeilt beeilt h beeil | i | person | |
rest rested rested | *aus+ruhen ruht ausgeruht h ruh | i | person | | at=rest
travel travelled travelled | reisen reist gereist s reise | i | adult | | to=far
go went gone | gehen geht gegangen s geh | i | person | | to=near
run ran run | laufen läuft gelaufen s lauf | i | young pet | | to=run
drive drove driven | fahren fährt gefahren s fahr | i | adult | | to=far to=drive
fly flew flown | fliegen fliegt geflogen s flieg | i | adult | | to=far
live lived lived | wohnen wohnt gewohnt h wohn | i | person | | stative at=live need
put put put | stellen stellt gestellt h stell | spot | person | upright plate |
lay laid laid | legen legt gelegt h leg | spot | person | thin |
hang hung hung | hängen hängt gehängt h häng | spot | person | wall |
lie lay lain | liegen liegt gelegen h lieg | rest | - | thin book |
stand stood stood | stehen steht gestanden h steh | rest | - | upright |
sit_down sat_down sat_down | *setzen setzt gesetzt h setz | seat | person | sofa chair bed |
stay stayed stayed | bleiben bleibt geblieben s bleib | i | person | | at=stay need stative
"""

# English at, English to, German at, German to, groups (`-`: no such phrase)
PLACES = """
in_the_kitchen|to_the_kitchen|in_der_Küche|in_die_Küche|meal near kitchen home
in_the_living_room|to_the_living_room|im_Wohnzimmer|ins_Wohnzimmer|rest near home tv sleep doze
in_the_bedroom|to_the_bedroom|im_Schlafzimmer|ins_Schlafzimmer|sleep
in_the_garden|to_the_garden|im_Garten|in_den_Garten|rest near meal play work home stay
on_the_balcony|to_the_balcony|auf_dem_Balkon|auf_den_Balkon|rest meal near
at_the_office|to_the_office|im_Büro|ins_Büro|work desk drive stay
in_the_park|to_the_park|im_Park|in_den_Park|rest near run play
in_the_forest|to_the_forest|im_Wald|in_den_Wald|run play near
at_school|to_school|in_der_Schule|in_die_Schule|near
in_the_library|to_the_library|in_der_Bibliothek|in_die_Bibliothek|near desk work
at_the_supermarket|to_the_supermarket|im_Supermarkt|in_den_Supermarkt|shop near drive
at_the_market|to_the_market|auf_dem_Markt|auf_den_Markt|shop near
in_the_restaurant|to_the_restaurant|im_Restaurant|ins_Restaurant|meal near
in_the_café|to_the_café|im_Café|ins_Café|meal near wait
in_the_hotel|to_the_hotel|im_Hotel|ins_Hotel|sleep stay drive
in_the_hospital|to_the_hospital|im_Krankenhaus|ins_Krankenhaus|work drive
at_the_station|to_the_station|am_Bahnhof|zum_Bahnhof|wait near run drive
at_the_airport|to_the_airport|am_Flughafen|zum_Flughafen|wait drive
at_the_bus_stop|to_the_bus_stop|an_der_Haltestelle|zur_Haltestelle|wait run
at_the_lake|to_the_lake|am_See|zum_See|near drive rest
in_the_lake|-|im_See|-|swim
in_the_sea|-|im_Meer|-|swim
on_the_beach|to_the_beach|am_Strand|zum_Strand|rest run play near
at_the_theatre|to_the_theatre|im_Theater|ins_Theater|near
at_the_cinema|to_the_cinema|im_Kino|ins_Kino|near
at_the_swimming_pool|to_the_swimming_pool|im_Schwimmbad|ins_Schwimmbad|near swim
at_home|home|zu_Hause|nach_Hause|rest meal near run work sleep stay tv desk home drive
in_bed|to_bed|im_Bett|ins_Bett|doze stay
on_the_sofa|-|auf_dem_Sofa|-|doze sleep rest
at_the_party|to_the_party|auf_der_Party|auf_die_Party|party
at_the_wedding|to_the_wedding|auf_der_Hochzeit|zur_Hochzeit|party
in_Berlin|to_Berlin|in_Berlin|nach_Berlin|far live
in_Hamburg|to_Hamburg|in_Hamburg|nach_Hamburg|far live
in_Munich|to_Munich|in_München|nach_München|far live
in_Vienna|to_Vienna|in_Wien|nach_Wien|far live
in_Cologne|to_Cologne|in_Köln|nach_Köln|far live
in_Zurich|to_Zurich|in_Zürich|nach_Zürich|far live
in_Rome|to_Rome|in_Rom|nach_Rom|far live
in_Germany|to_Germany|in_Deutschland|nach_Deutschland|far live
in_Austria|to_Austria|in_Österreich|nach_Österreich|far live
in_Italy|to_Italy|in_Italien|nach_Italien|far live
in_Switzerland|to_Switzerland|in_der_Schweiz|in_die_Schweiz|far live
in_the_mountains|to_the_mountains|in_den_Bergen|in_die_Berge|far live
in_a_small_village|to_a_small_village|in_einem_kleinen_Dorf|in_ein_kleines_Dorf|live
in_a_big_town|to_a_big_town|in_einer_großen_Stadt|in_eine_große_Stadt|live
"""

# English, German, tenses it goes with
TIMES = """
yesterday|gestern|past
yesterday_evening|gestern_Abend|past
last_week|letzte_Woche|past
last_year|letztes_Jahr|past
two_days_ago|vor_zwei_Tagen|past
three_weeks_ago|vor_drei_Wochen|past
this_morning|heute_Morgen|past
on_Monday|am_Montag|past fut
on_Tuesday|am_Dienstag|past fut
on_Wednesday|am_Mittwoch|past fut
on_Thursday|am_Donnerstag|past fut
on_Friday|am_Freitag|past fut
on_Saturday|am_Samstag|past fut
on_Sunday|am_Sonntag|past fut
today|heute|past fut prog
tomorrow|morgen|fut
tomorrow_morning|morgen_früh|fut
the_day_after_tomorrow|übermorgen|fut
this_evening|heute_Abend|fut
next_week|nächste_Woche|fut
next_year|nächstes_Jahr|fut
now|jetzt|prog
every_day|jeden_Tag|pres
every_week|jede_Woche|pres
every_morning|jeden_Morgen|pres
every_evening|jeden_Abend|pres
every_Monday|jeden_Montag|pres
every_Friday|jeden_Freitag|pres
every_Sunday|jeden_Sonntag|pres
in_the_morning|am_Morgen|pres
in_the_afternoon|am_Nachmittag|pres
in_the_evening|am_Abend|pres
at_the_weekend|am_Wochenende|pres fut
in_summer|im_Sommer|pres
in_winter|im_Winter|pres
"""

FREQUENCIES = (
    Phrase("often", "oft"),
    Phrase("always", "immer"),
    Phrase("never", "nie"),
    Phrase("sometimes", "manchmal"),
    Phrase("usually", "meistens"),
    Phrase("rarely", "selten"),
)


@dataclass(frozen=True)
class Place:
    """Where something happens and where somebody goes, in both languages."""

    at: Phrase
    to: Phrase
    groups: frozenset[str]


def _spaced(text: str) -> str:
    return text.replace("_", " ")


def _read_verb(line: str) -> Verb:
    columns = [part.strip() for part in line.split("|")]
    english, german, frame, subjects, objects, flags = [*columns, "", ""][:6]
    base, past, participle = map(_spaced, english.split())
    en, _, particle = base.partition("+")
    infinitive, third, de_participle, aux, imperative = german.split()
    prefix, _, stem = infinitive.lstrip("*").rpartition("+")
    kind, *governed = frame.split(":")
    return Verb(
        en=en,
        particle=particle,
        past=past,
        participle=participle,
        de=stem,
        prefix=prefix,
        de_third=third,
        de_participle=de_participle,
        aux=aux,
        imperative=imperative,
        frame=kind,
        prep=Phrase(governed[0], governed[1]) if governed else Phrase("", ""),
        prep_case=governed[2] if governed else "",
        subjects=frozenset(subjects.split()),
        objects=frozenset(objects.split()),
        reflexive=infinitive.startswith("*"),
        flags=frozenset(flags.split()),
    )


def read_verbs(table: str = VERBS) -> dict[str, Verb]:
    """Parse a verb table; the key is the English base with its particle."""
    verbs = (_read_verb(line) for line in table.replace("\n    ", " ").strip().splitlines())
    return {f"{verb.en} {verb.particle}".strip(): verb for verb in verbs}


def read_places() -> tuple[Place, ...]:
    """Parse the table of places."""
    places = []
    for line in PLACES.strip().splitlines():
        en_at, en_to, de_at, de_to, groups = map(_spaced, line.split("|"))
        places.append(Place(Phrase(en_at, de_at), Phrase(en_to, de_to), frozenset(groups.split())))
    return tuple(places)


def read_times() -> dict[str, tuple[Phrase, ...]]:
    """Parse the table of times into one list for each tense."""
    times: dict[str, list[Phrase]] = {}
    for line in TIMES.strip().splitlines():
        english, german, tenses = line.split("|")
        for tense in tenses.split():
            times.setdefault(tense, []).append(Phrase(_spaced(english), _spaced(german)))
    return {tense: tuple(phrases) for tense, phrases in times.items()}
