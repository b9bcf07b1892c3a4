# ruff: noqa: E501, SIM905  (tables read better one entry a line)
"""Facts from small tables (capitals, elements, animals, opposites, colours) asked in several ways.

The tables are common knowledge, written for this project. Definitions and commands come from corpora (`..corpora`).
"""

from __future__ import annotations

import random

from ..sample import Sample, ask

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Austria:Vienna|Norway:Oslo|Portugal:Lisbon|Greece:Athens|"
        "the Czech Republic:Prague|Poland:Warsaw|Ireland:Dublin|Egypt:Cairo|Japan:Tokyo|China:Beijing|India:New Delhi|Peru:Lima|"
        "Canada:Ottawa|Australia:Canberra|Kenya:Nairobi|Finland:Helsinki|Hungary:Budapest|Switzerland:Bern|Sweden:Stockholm|"
        "Denmark:Copenhagen|Belgium:Brussels|the Netherlands:Amsterdam|the United Kingdom:London|the United States:Washington|"
        "Mexico:Mexico City|Brazil:Brasilia|Argentina:Buenos Aires|Chile:Santiago|Colombia:Bogota|Ecuador:Quito|Cuba:Havana|"
        "Latvia:Riga|Lithuania:Vilnius|Estonia:Tallinn|Russia:Moscow|Ukraine:Kyiv|Romania:Bucharest|Bulgaria:Sofia|"
        "Serbia:Belgrade|Croatia:Zagreb|Slovenia:Ljubljana|Slovakia:Bratislava|Turkey:Ankara|Iran:Tehran|Iraq:Baghdad|"
        "South Korea:Seoul|Vietnam:Hanoi|Thailand:Bangkok|Indonesia:Jakarta|Nigeria:Abuja|Ghana:Accra|Tunisia:Tunis|"
        "Morocco:Rabat|Iceland:Reykjavik|New Zealand:Wellington|Mongolia:Ulaanbaatar|Nepal:Kathmandu"
    ).split("|")
)

ELEMENTS = [
    entry.split(":")
    for entry in (
        "hydrogen:H:1|helium:He:2|lithium:Li:3|carbon:C:6|nitrogen:N:7|oxygen:O:8|fluorine:F:9|neon:Ne:10|sodium:Na:11|"
        "magnesium:Mg:12|aluminium:Al:13|silicon:Si:14|phosphorus:P:15|sulfur:S:16|chlorine:Cl:17|argon:Ar:18|potassium:K:19|"
        "calcium:Ca:20|iron:Fe:26|nickel:Ni:28|copper:Cu:29|zinc:Zn:30|silver:Ag:47|tin:Sn:50|iodine:I:53|gold:Au:79|"
        "mercury:Hg:80|lead:Pb:82|uranium:U:92"
    ).split("|")
]

# (question form, answer form, pairs)
TABLES = (
    ("What sound does a {a} make?", "A {a} says \"{b}\".",
     "dog:woof|cat:meow|cow:moo|duck:quack|sheep:baa|pig:oink|owl:hoo|frog:croak|rooster:cock-a-doodle-doo|mouse:squeak|bee:buzz|snake:hiss|horse:neigh"),
    ("What is the opposite of {a}?", "The opposite of {a} is {b}.",
     "hot:cold|big:small|fast:slow|high:low|long:short|light:dark|old:new|wet:dry|full:empty|hard:soft|loud:quiet|early:late|open:closed|"
     "rich:poor|strong:weak|sweet:sour|thick:thin|happy:sad|clean:dirty|near:far|up:down|left:right|day:night|summer:winter|buy:sell|win:lose|"
     "remember:forget|push:pull|begin:end|laugh:cry"),
    ("What color is {a}?", "{a} is {b}.",
     "grass:green|the sky:blue|snow:white|coal:black|a lemon:yellow|a tomato:red|an orange:orange|a carrot:orange|milk:white|chocolate:brown|"
     "a banana:yellow|blood:red|an elephant:grey|a plum:purple|a flamingo:pink|gold:golden"),
    ("How many legs does {a} have?", "{a} has {b} legs.",
     "a dog:four|a cat:four|a bird:two|a spider:eight|an ant:six|a bee:six|a fish:no|a snake:no|a horse:four|a crab:ten|a human:two|a hen:two|a beetle:six"),
    ("What is the plural of {a}?", "The plural of {a} is {b}.",
     "mouse:mice|child:children|foot:feet|tooth:teeth|man:men|woman:women|goose:geese|sheep:sheep|leaf:leaves|knife:knives|city:cities|box:boxes|"
     "dog:dogs|house:houses|wolf:wolves|baby:babies|ox:oxen|life:lives"),
    ("Where does {a} live?", "{a} lives {b}.",
     "a whale:in the sea|a bear:in the forest|a camel:in the desert|a penguin:in the Antarctic|a frog:by the pond|a bee:in a hive|a fox:in a den|"
     "a bird:in a nest|a mole:under the ground|a king:in a castle|a sailor:on a ship|a spider:in a web|a polar bear:in the Arctic"),
    ("What do you use {a} for?", "You use {a} {b}.",
     "a hammer:to drive nails|a knife:to cut|a pen:to write|a key:to open a lock|an umbrella:to stay dry|a clock:to tell the time|"
     "a broom:to sweep|a needle:to sew|a lamp:to see in the dark|a ladder:to climb|a spoon:to eat soup|a map:to find the way|"
     "a telescope:to look at the stars|soap:to wash|a bridge:to cross a river|a stove:to cook"),
    ("What does a {a} do?", "A {a} {b}.",
     "baker:bakes bread|teacher:teaches children|doctor:helps sick people|farmer:grows food|tailor:sews clothes|pilot:flies planes|"
     "carpenter:works with wood|postman:brings letters|gardener:looks after plants|painter:paints pictures|fisherman:catches fish|"
     "librarian:looks after books|clockmaker:repairs clocks|blacksmith:forges iron|shepherd:looks after sheep|cook:cooks meals"),
)  # fmt: skip

WHY = (
    ("Why is the sky blue?", "The air scatters blue light more than red light, so we see blue from everywhere."),
    ("Why is the grass green?", "Grass has chlorophyll, which takes in red and blue light and gives back the green."),
    ("Why do leaves fall in autumn?", "Trees lose their leaves to save water in the cold months."),
    ("Why does ice float?", "Ice is lighter than water, because water grows when it freezes."),
    ("Why is the sea salty?", "Rivers carry salt from the rocks into the sea, and only the water leaves it again."),
    ("Why do we sleep?", "Sleep lets the body rest and the brain sort what it has learned."),
    ("Why does the moon change its shape?", "The sun lights one half of the moon, and we see more or less of that half."),
    ("Why is it dark at night?", "The earth turns, and at night our side looks away from the sun."),
    ("Why do birds sing?", "Birds sing to find a partner and to say that a place is theirs."),
    ("Why do cats purr?", "Cats purr when they are content, and sometimes to calm themselves."),
    ("Why does bread rise?", "Yeast eats sugar and makes gas, and the gas lifts the dough."),
    ("Why do we have seasons?", "The axis of the earth is tilted, so each half leans towards the sun for part of the year."),
    ("Why does metal feel cold?", "Metal takes the heat from your hand quickly."),
    ("Why do onions make us cry?", "Cut onions let out a gas that stings the eyes."),
    ("Why is the sun hot?", "Inside the sun, hydrogen is turned into helium, and that gives heat and light."),
    ("Why do boats float?", "A boat pushes away water that weighs as much as the boat."),
    ("Why does it rain?", "Water rises as vapour, cools in the clouds, and falls as drops."),
    ("Why is snow white?", "Snow has many small crystals that scatter light of every colour."),
    ("How does a rainbow form?", "Drops of rain bend sunlight and split it into its colours."),
    ("What is thunder?", "Lightning heats the air so quickly that it bursts apart, and we hear that as thunder."),
    ("How do plants eat?", "Plants make sugar from light, water and air, and take minerals from the soil."),
    ("What is a shadow?", "A shadow is the place where something keeps the light away."),
    ("How do bees make honey?", "Bees collect nectar and let its water dry until it is honey."),
    ("What is an echo?", "An echo is a sound that comes back from a wall or a hill."),
)

_START = ("", "", "", "Tell me: ", "Question: ", "Do you know? ", "I wonder. ", "Quick question: ")


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def capital(rng: random.Random) -> Sample:
    """Capitals, both ways."""
    country = rng.choice(list(CAPITALS))
    city = CAPITALS[country]
    start = rng.choice(_START)
    if rng.random() < 0.7:
        question, answer = f"What is the capital of {country}?", f"The capital of {country} is {city}."
    else:
        question, answer = f"Which country has the capital {city}?", f"{city} is the capital of {country}."
    return Sample("capital", f"{start}{question}", conversation=ask(start + question, thinking=rng.random() < 0.4),
                  answer=answer, check={"text": answer})  # fmt: skip


def element(rng: random.Random) -> Sample:
    """Symbols and numbers of elements."""
    name, symbol, number = rng.choice(ELEMENTS)
    start = rng.choice(_START)
    question, answer = rng.choice((
        (f"What is the symbol of {name}?", f"The symbol of {name} is {symbol}."),
        (f"What is the atomic number of {name}?", f"The atomic number of {name} is {number}."),
        (f"Which element has the symbol {symbol}?", f"{symbol} is {name}."),
    ))  # fmt: skip
    return Sample(
        "element", f"{start}{question}", conversation=ask(start + question, thinking=rng.random() < 0.3), answer=answer
    )


def table(rng: random.Random) -> Sample:
    """One row of one table."""
    question, answer, pairs = rng.choice(TABLES)
    a, b = rng.choice(pairs.split("|")).split(":")
    start = rng.choice(_START)
    asked = start + question.format(a=a)
    return Sample(
        "table", asked, conversation=ask(asked, thinking=rng.random() < 0.3), answer=_capitalized(answer.format(a=a, b=b))
    )


def why(rng: random.Random) -> Sample:
    """Short explanations."""
    question, answer = rng.choice(WHY)
    start = rng.choice((*_START, "Explain to me: ", "My child asks: ", "Can you explain this? ", "Please explain. "))
    end = rng.choice(("", "", " Answer in one sentence.", " Please be short.", " Keep it simple."))
    thinking = rng.random() < 0.4
    reasoning = "The user wants a short explanation." if thinking else ""
    return Sample("why", f"{start}{question}{end}", conversation=ask(f"{start}{question}{end}", thinking=thinking),
                  reasoning=reasoning, answer=answer)  # fmt: skip


KINDS = {"capital": capital, "element": element, "table": table, "why": why}
