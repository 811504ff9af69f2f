"""The hand-written nouns, adjectives and names of the demo corpus.

Every table is one entry a line, so that a reader who knows German can check it by eye.  A space is
written as an underscore.  The last columns are semantic tags: verbs and adjectives name the tags
they go with, which is what keeps "The dog drinks the table." out of the corpus.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """A noun with both its forms in both languages."""

    en: str  # English singular
    en_pl: str  # English plural, "-" for a mass noun
    de: str  # German singular
    de_pl: str  # German plural, "-" for a mass noun
    gender: str  # m, f or n
    weak: bool  # n-declension: accusative and dative singular look like the plural
    tags: frozenset[str]


@dataclass(frozen=True)
class Adjective:
    """An adjective; `stem` is what the German endings are put on (teuer, but teur-er)."""

    en: str
    de: str
    stem: str
    en_more: str  # English comparative, "-" where none is used
    de_more: str
    tags: frozenset[str]


@dataclass(frozen=True)
class Name:
    """A proper name, the same in both languages unless given twice."""

    en: str
    de: str
    gender: str


# singular/plural, singular/plural, gender (w: n-declension), tags
NOUNS = """
man/men Mann/Männer m person adult someone
woman/women Frau/Frauen f person adult someone
child/children Kind/Kinder n person young kinoff
boy/boys Junge/Jungen mw person young someone
girl/girls Mädchen/Mädchen n person young someone
baby/babies Baby/Babys n baby
father/fathers Vater/Väter m person adult kin
mother/mothers Mutter/Mütter f person adult kin
brother/brothers Bruder/Brüder m person young kin many
sister/sisters Schwester/Schwestern f person young kin many
son/sons Sohn/Söhne m person young kin many
daughter/daughters Tochter/Töchter f person young kin many
uncle/uncles Onkel/Onkel m person adult kin
aunt/aunts Tante/Tanten f person adult kin
grandfather/grandfathers Großvater/Großväter m person adult kin
grandmother/grandmothers Großmutter/Großmütter f person adult kin
friend/friends Freund/Freunde m person adult kin many
neighbour/neighbours Nachbar/Nachbarn mw person adult kin
colleague/colleagues Kollege/Kollegen mw person adult kin
boss/bosses Chef/Chefs m person adult kin
teacher/teachers Lehrer/Lehrer m person adult prof
doctor/doctors Arzt/Ärzte m person adult prof
student/students Student/Studenten mw person adult prof
pupil/pupils Schüler/Schüler m person young someone
policeman/policemen Polizist/Polizisten mw person adult prof
baker/bakers Bäcker/Bäcker m person adult prof
gardener/gardeners Gärtner/Gärtner m person adult prof
waiter/waiters Kellner/Kellner m person adult prof
farmer/farmers Bauer/Bauern mw person adult prof
nurse/nurses Krankenschwester/Krankenschwestern f person adult prof
tourist/tourists Tourist/Touristen mw person adult someone
guest/guests Gast/Gäste m person adult someone
dog/dogs Hund/Hunde m animal pet
cat/cats Katze/Katzen f animal pet
horse/horses Pferd/Pferde n animal farm
bird/birds Vogel/Vögel m animal pet
cow/cows Kuh/Kühe f animal farm
pig/pigs Schwein/Schweine n animal farm
mouse/mice Maus/Mäuse f animal pest
rabbit/rabbits Kaninchen/Kaninchen n animal pet
bear/bears Bär/Bären mw animal wild
lion/lions Löwe/Löwen mw animal wild
apple/apples Apfel/Äpfel m food fruit
banana/bananas Banane/Bananen f food fruit
tomato/tomatoes Tomate/Tomaten f food vegetable
potato/potatoes Kartoffel/Kartoffeln f food vegetable hot
egg/eggs Ei/Eier n food hot
cake/cakes Kuchen/Kuchen m food baked dish
roll/rolls Brötchen/Brötchen n food baked
pizza/pizzas Pizza/Pizzas f food baked dish
soup/soups Suppe/Suppen f food dish hot
salad/salads Salat/Salate m food dish
bread/- Brot/- n foodmass bakedmass
cheese/- Käse/- m foodmass
rice/- Reis/- m foodmass hotmass
meat/- Fleisch/- n foodmass hotmass
fish/- Fisch/- m foodmass hotmass
chocolate/- Schokolade/- f foodmass
coffee/- Kaffee/- m drink hotdrink
tea/- Tee/- m drink hotdrink
milk/- Milch/- f drink
water/- Wasser/- n drink
juice/- Saft/- m drink
beer/- Bier/- n drink alcohol
wine/- Wein/- m drink alcohol
lemonade/- Limonade/- f drink
coat/coats Mantel/Mäntel m cloth own
dress/dresses Kleid/Kleider n cloth dress
shirt/shirts Hemd/Hemden n cloth
jacket/jackets Jacke/Jacken f cloth own
hat/hats Hut/Hüte m cloth own
sweater/sweaters Pullover/Pullover m cloth
shoe/shoes Schuh/Schuhe m pair
bag/bags Tasche/Taschen f small own carry lid hollow
umbrella/umbrellas Regenschirm/Regenschirme m small own lose colour
suitcase/suitcases Koffer/Koffer m own carry lid hollow
table/tables Tisch/Tische m furn
chair/chairs Stuhl/Stühle m furn
bed/beds Bett/Betten n furn
sofa/sofas Sofa/Sofas n furn
cupboard/cupboards Schrank/Schränke m furn lid hollow
shelf/shelves Regal/Regale n furn
desk/desks Schreibtisch/Schreibtische m furn
lamp/lamps Lampe/Lampen f furn dev
carpet/carpets Teppich/Teppiche m furn
book/books Buch/Bücher n read small lend text
letter/letters Brief/Briefe m read post thin text
newspaper/newspapers Zeitung/Zeitungen f read thin daily
poem/poems Gedicht/Gedichte n read words
postcard/postcards Postkarte/Postkarten f read post thin
story/stories Geschichte/Geschichten f read words tell
cup/cups Tasse/Tassen f vessel upright
glass/glasses Glas/Gläser n vessel upright hollow
bottle/bottles Flasche/Flaschen f vessel upright lid hollow
vase/vases Vase/Vasen f upright pretty
knife/knives Messer/Messer n cutlery
spoon/spoons Löffel/Löffel m cutlery
car/cars Auto/Autos n veh private
bus/buses Bus/Busse m veh public
train/trains Zug/Züge m veh public
bicycle/bicycles Fahrrad/Fahrräder n veh private
radio/radios Radio/Radios n dev repair
computer/computers Computer/Computer m dev repair
television/televisions Fernseher/Fernseher m dev repair
camera/cameras Kamera/Kameras f small repair lend own
clock/clocks Uhr/Uhren f repair pretty wall
light/lights Licht/Lichter n light
guitar/guitars Gitarre/Gitarren f inst
piano/pianos Klavier/Klaviere n inst
window/windows Fenster/Fenster n lid part
door/doors Tür/Türen f lid part
box/boxes Kiste/Kisten f carry lid hollow
key/keys Schlüssel/Schlüssel m small thin lose own
ticket/tickets Fahrkarte/Fahrkarten f small thin lose
passport/passports Pass/Pässe m thin lose own
picture/pictures Bild/Bilder n art wall
photo/photos Foto/Fotos n thin art
flower/flowers Blume/Blumen f plant gift
tree/trees Baum/Bäume m plant tall
ball/balls Ball/Bälle m small toy
present/presents Geschenk/Geschenke n small gift
ring/rings Ring/Ringe m lose pretty gift
pencil/pencils Bleistift/Bleistifte m small thin lend
bill/bills Rechnung/Rechnungen f bill
money/- Geld/- n money
music/- Musik/- f music
German/- Deutsch/- n language
English/- Englisch/- n language
Italian/- Italienisch/- n language
question/questions Frage/Fragen f abstract ask
problem/problems Problem/Probleme n abstract hard
word/words Wort/Wörter n abstract words
sentence/sentences Satz/Sätze m abstract words
rule/rules Regel/Regeln f abstract hard
film/films Film/Filme m show
song/songs Lied/Lieder n song
concert/concerts Konzert/Konzerte n event
party/parties Party/Partys f event plan
trip/trips Reise/Reisen f event plan
weekend/weekends Wochenende/Wochenenden n weekend
house/houses Haus/Häuser n home building
flat/flats Wohnung/Wohnungen f home
room/rooms Zimmer/Zimmer n room
kitchen/kitchens Küche/Küchen f room
bathroom/bathrooms Badezimmer/Badezimmer n room
garden/gardens Garten/Gärten m outside
town/towns Stadt/Städte f place
village/villages Dorf/Dörfer n place
street/streets Straße/Straßen f way
bridge/bridges Brücke/Brücken f building way
museum/museums Museum/Museen n public_place building
castle/castles Schloss/Schlösser n sight visit
church/churches Kirche/Kirchen f sight
hotel/hotels Hotel/Hotels n public_place building
restaurant/restaurants Restaurant/Restaurants n public_place
café/cafés Café/Cafés n public_place
school/schools Schule/Schulen f public_place building
shop/shops Geschäft/Geschäfte n public_place
"""

# English, German, stem for endings, comparatives, tags
ADJECTIVES = """
old alt alt older älter adult animal cloth own furn read veh private dev home building sight tree
    repair
young jung jung younger jünger person animal
new neu neu newer neuer cloth own pair lend furn private dev home repair show song
big groß groß bigger größer animal furn home place building sight carry toy fruit room outside
    plant
small klein klein smaller kleiner animal furn home place building sight carry toy fruit room
    outside baby
tall groß groß taller größer person
beautiful schön schön - - cloth furn art plant gift pretty home place building sight song outside
pretty hübsch hübsch prettier hübscher dress pretty
expensive teuer teur - - cloth carry pair furn dev home repair pretty private lend
cheap billig billig cheaper billiger cloth pair furn dev repair upright
long lang lang longer länger read way show dress
short kurz kurz shorter kürzer read show dress
interesting interessant interessant - - text show place visit tell daily
boring langweilig langweilig - - text show event daily
red rot rot - - cloth colour pair carry vessel private toy flower apple
blue blau blau - - cloth colour pair carry vessel private toy
green grün grün - - cloth colour pair carry vessel private toy tree
black schwarz schwarz - - cloth colour pair carry pet private
white weiß weiß - - colour cloth pair pet vessel
yellow gelb gelb - - colour cloth pair toy vessel
warm warm warm warmer wärmer cloth hot hotdrink pair
cold kalt kalt colder kälter drink
hot heiß heiß hotter heißer hotdrink hot
fresh frisch frisch fresher frischer fruit vegetable foodmass baked
sweet süß süß sweeter süßer fruit
heavy schwer schwer heavier schwerer carry furn
fast schnell schnell faster schneller veh
friendly freundlich freundlich friendlier freundlicher person
nice nett nett nicer netter person
funny lustig lustig funnier lustiger show words tell
clever klug klug cleverer klüger person pet
dangerous gefährlich gefährlich - - wild
lazy faul faul lazier fauler state pet
difficult schwierig schwierig - - abstract hard ask
easy einfach einfach easier einfacher hard ask
important wichtig wichtig - - post ask hard words
modern modern modern - - furn home dev building
broken kaputt kaputt - - dev repair private upright
dirty schmutzig schmutzig dirtier schmutziger cloth pair vessel cutlery room private part
clean sauber sauber cleaner sauberer vessel cutlery room cloth
empty leer leer - - hollow
quiet ruhig ruhig quieter ruhiger home place way
happy glücklich glücklich happier glücklicher state
tired müde müd - - state
ill krank krank - - state
sad traurig traurig sadder trauriger state
strong stark stark stronger stärker person animal
"""

NAMES = """
Anna f
Maria f
Julia f
Laura f
Emma f
Nina f
Eva f
Peter m
Paul m
Martin m
David m
Ben m
Tim m
Oliver m
"""

PET_NAMES = ("Rex", "Mimi", "Bello", "Luna", "Minka", "Charly")

TITLED = (
    Name("Mr Müller", "Herr Müller", "m"),
    Name("Mr Weber", "Herr Weber", "m"),
    Name("Mrs Schneider", "Frau Schneider", "f"),
    Name("Mrs Becker", "Frau Becker", "f"),
)

NUMBERS = {
    2: ("two", "zwei"),
    3: ("three", "drei"),
    4: ("four", "vier"),
    5: ("five", "fünf"),
    6: ("six", "sechs"),
    7: ("seven", "sieben"),
    8: ("eight", "acht"),
    9: ("nine", "neun"),
    10: ("ten", "zehn"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    20: ("twenty", "zwanzig"),
    30: ("thirty", "dreißig"),
    40: ("forty", "vierzig"),
    50: ("fifty", "fünfzig"),
}


def _spaced(word: str) -> str:
    return word.replace("_", " ")


def read_nouns(table: str = NOUNS) -> dict[str, Noun]:
    """Parse a noun table; the key is the English singular."""
    nouns: dict[str, Noun] = {}
    for line in table.strip().splitlines():
        english, german, gender, *tags = line.split()
        en, en_pl = map(_spaced, english.split("/"))
        de, de_pl = german.split("/")
        # The noun is a tag of its own, so that a verb or adjective may name it directly.
        nouns[en] = Noun(
            en, en_pl, de, de_pl, gender[0], gender.endswith("w"), frozenset([*tags, en])
        )
    return nouns


def read_adjectives(table: str = ADJECTIVES) -> dict[str, Adjective]:
    """Parse an adjective table; the key is the English word."""
    adjectives: dict[str, Adjective] = {}
    for line in table.replace("\n    ", " ").strip().splitlines():
        en, de, stem, en_more, de_more, *tags = line.split()
        adjectives[en] = Adjective(en, de, stem, en_more, de_more, frozenset(tags))
    return adjectives


def read_names() -> tuple[Name, ...]:
    """Parse the table of first names."""
    rows = (line.split() for line in NAMES.strip().splitlines())
    return tuple(Name(name, name, gender) for name, gender in rows)
