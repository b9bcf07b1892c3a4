# ruff: noqa: SIM905  (lists of words read better as text)
"""Words that fill the slots of generators. Nothing here is random; every list is in a fixed order."""

from __future__ import annotations

GIRLS = (
    "Anna Mia Lena Nora Ida Clara Ella Ruth Vera Lucy Emma Rosa Jana Tilda Olga Nina Paula Greta Zoe Iris Mona Sara Alma Edda "
    "Hanna Kira Lotte Maja Petra Wanda Amina Fatima Yuki Mei Priya Leila Carmen Ines Chloe Freya"
).split()
BOYS = (
    "Tom Ben Max Paul Emil Jakob Oskar Felix Leo Anton Karl Hugo Nico Otto Jonas Simon Erik Peter Adam David Noah Moritz "
    "Viktor Samuel Martin Finn Theo Arthur Henry Oliver Omar Hassan Kenji Ravi Diego Luis Ivan Pavel Kofi Jack"
).split()
PETS = (
    "dog cat rabbit hedgehog squirrel duck goose mouse fox badger owl frog pony donkey lamb goat otter beaver mole hamster "
    "turtle parrot raven kitten puppy calf deer weasel"
).split()
THINGS = (
    "whistle lantern drum kite clock mirror teapot basket umbrella trumpet suitcase compass feather lamp hammer blanket marble "
    "telescope camera wheel bell wooden_horse music_box paper_boat scarf flute puppet ball book pencil spoon bucket ladder "
    "bicycle sled rope toy_train glass_bead snow_globe tin_box magnifying_glass"
).split()
FOODS = (
    "bread honey soup pancakes cheese apples plums cherries porridge noodles dumplings walnuts raspberries pears cake "
    "gingerbread potatoes carrots rice biscuits jam melon grapes"
).split()
COLORS = "red blue green yellow white black brown orange purple pink grey golden silver".split()
PLANTS = "rose tulip sunflower bean daisy lily poppy cactus violet pumpkin tomato lavender".split()
PLACES = (
    "the village|the old mill|the harbour|the market|the station|the valley|the small town|the castle|the meadow|the island|"
    "the lake|the hills|the forest edge|the bakery|the bridge|the river bank|the lighthouse|the orchard|the monastery|the fair"
).split("|")
JOBS = (
    "baker tailor fisherman teacher doctor painter carpenter gardener miller sailor shepherd blacksmith postman cook farmer "
    "librarian clockmaker musician pilot nurse"
).split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Oslo Lisbon Athens Prague Warsaw Dublin Cairo Tokyo Beijing Delhi Lima Toronto "
    "Sydney Nairobi Helsinki Budapest Zurich Geneva Hamburg Munich Milan Naples Porto Seville Boston Chicago Seattle Denver "
    "Austin Montreal Mumbai Seoul Osaka Hanoi Jakarta Lagos Accra Tunis Bogota Quito Santiago Havana Riga Vilnius Tallinn"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
UNITS_OF_COUNT = (
    "apples books coins stamps shells eggs pencils cards marbles stones tickets buttons candles nails cups plates flowers "
    "letters pears oranges"
).split()


def spoken(word: str) -> str:
    """A list entry as text."""
    return word.replace("_", " ")


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
