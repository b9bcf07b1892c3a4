# ruff: noqa: E501  (tables read better one entry a line)
"""The tools that training data declares: schema, ways to ask for it, and what a result looks like.

`P("city", "string", "city")` is a parameter: name, JSON type, and which values it takes (`VALUES`, or a tuple of choices).
Parameters that a phrase names are arguments of its call; every phrase names all required ones.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import words


@dataclass(frozen=True, slots=True)
class P:
    """A parameter. `values`: a name of `VALUES` or a tuple of choices. optional: not in `required`."""

    name: str
    type: str
    values: str | tuple[str, ...]
    about: str = ""
    optional: bool = False

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": self.type}
        if self.about:
            schema["description"] = self.about
        if isinstance(self.values, tuple):
            schema["enum"] = list(self.values)
        if self.type == "array":
            schema["items"] = {"type": "string"}
        return schema

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.values) if isinstance(self.values, tuple) else VALUES[self.values](rng)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with phrases that ask for it, what it returns ({...} are arguments or `result` values) and what to say then."""

    name: str
    about: str
    parameters: tuple[P, ...]
    phrases: tuple[str, ...]
    result: tuple[tuple[str, str], ...] = (("status", "ok"),)  # key -> a name of VALUES, or a fixed text
    reply: str = "Done."

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {p.name: p.schema() for p in self.parameters},
            "required": [p.name for p in self.parameters if not p.optional],
        }


def _number(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def _pick(values) -> Callable[[random.Random], str]:
    return lambda rng: words.spoken(rng.choice(values))


def _code(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_uppercase + string.digits) for _ in range(rng.randint(5, 9)))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 9)))


def _file(rng: random.Random) -> str:
    stem = rng.choice((words.spoken(rng.choice(words.THINGS)).replace(" ", "_"), _word(rng)))
    folder = rng.choice(("", "", "docs/", "src/", "/tmp/", f"{_word(rng)}/"))
    return f"{folder}{stem}.{rng.choice(('txt', 'py', 'md', 'csv', 'json', 'log'))}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2020, 2032)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: random.Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(0, 60, 5):02}"


def _mail(rng: random.Random) -> str:
    name = rng.choice(words.GIRLS + words.BOYS).lower()
    return (
        f"{name}{rng.choice(('', str(rng.randint(1, 99))))}@{rng.choice(('example.com', 'mail.example', _word(rng) + '.org'))}"
    )


def _phrase(rng: random.Random) -> str:
    return rng.choice((
        f"{rng.choice(words.COLORS)} {words.spoken(rng.choice(words.THINGS))}", f"{rng.choice(words.FOODS)} recipe",
        f"history of {rng.choice(words.CITIES)}", f"how to draw {words.article(rng.choice(words.PETS))}",
        f"{rng.choice(words.PLANTS)} in winter", f"best {rng.choice(words.FOODS)} in {rng.choice(words.CITIES)}", _word(rng),
    ))  # fmt: skip


def _sentence(rng: random.Random) -> str:
    return rng.choice((
        f"Bring {rng.choice(words.FOODS)} on {rng.choice(words.DAYS)}", f"I will be late, start with the {rng.choice(words.FOODS)}",
        f"Please feed the {rng.choice(words.PETS)}", f"The {words.spoken(rng.choice(words.THINGS))} has arrived",
        f"Meet me at {_time(rng)} at {rng.choice(words.PLACES)}", f"Call {rng.choice(words.GIRLS)} about the {_word(rng)}",
    ))  # fmt: skip


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "city": _pick(words.CITIES), "person": _pick(words.GIRLS + words.BOYS), "food": _pick(words.FOODS),
    "thing": _pick(words.THINGS), "color": _pick(words.COLORS), "pet": _pick(words.PETS), "day": _pick(words.DAYS),
    "month": _pick(words.MONTHS), "plant": _pick(words.PLANTS), "job": _pick(words.JOBS), "code": _code, "word": _word,
    "file": _file, "date": _date, "time": _time, "mail": _mail, "phrase": _phrase, "sentence": _sentence,
    "small": _number(1, 12), "minutes": _number(1, 90), "percent": _number(0, 100), "number": _number(1, 999),
    "big": _number(1000, 99999), "degrees": _number(-10, 38), "year": _number(1900, 2030),
    "amount": lambda rng: rng.randint(100, 50000) / 100, "bool": lambda rng: rng.random() < 0.5,
    "list": lambda rng: [words.spoken(w) for w in rng.sample(words.FOODS + words.THINGS, rng.randint(2, 4))],
    "names": lambda rng: rng.sample(words.GIRLS + words.BOYS, rng.randint(2, 3)),
    "sky": _pick(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")),
}  # fmt: skip

CURRENCY = ("EUR", "USD", "GBP", "JPY", "CHF", "CNY")
ROOM = ("kitchen", "bedroom", "bathroom", "hall", "office", "garage", "cellar")
LANGUAGE = ("German", "French", "Spanish", "Italian", "Japanese", "Chinese", "Polish", "Dutch")
UNIT = ("celsius", "fahrenheit")

TOOLS: tuple[Tool, ...] = (
    Tool("get_weather", "Current weather in a city", (P("city", "string", "city"), P("unit", "string", UNIT, optional=True)),
         ("What is the weather in {city}?", "How warm is it in {city} in {unit}?", "Is it raining in {city}?",
          "Weather in {city}, please, in {unit}."), (("temperature", "degrees"), ("sky", "sky")),
         "In {city} it is {sky} and {temperature} degrees."),
    Tool("get_forecast", "Weather forecast for the coming days", (P("city", "string", "city"), P("days", "integer", "small")),
         ("What will the weather be in {city} for the next {days} days?", "Give me a forecast of {days} days for {city}."),
         (("temperature", "degrees"), ("sky", "sky")), "It will be {sky} in {city}, about {temperature} degrees."),
    Tool("get_time", "Local time in a city", (P("city", "string", "city"),),
         ("What time is it in {city}?", "Tell me the local time in {city}."), (("time", "time"),), "In {city} it is {time}."),
    Tool("convert_currency", "Convert an amount of money",
         (P("amount", "number", "amount"), P("source", "string", CURRENCY), P("target", "string", CURRENCY)),
         ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}."), (("result", "amount"),),
         "{amount} {source} are {result} {target}."),
    Tool("set_timer", "Start a kitchen timer", (P("minutes", "integer", "minutes"), P("label", "string", "food", optional=True)),
         ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes for the {label}."),
         (("status", "started"),), "The timer runs for {minutes} minutes."),
    Tool("set_alarm", "Set an alarm", (P("time", "string", "time"), P("day", "string", tuple(words.DAYS), optional=True)),
         ("Wake me at {time}.", "Set an alarm for {time} on {day}."), (("status", "set"),), "The alarm is set for {time}."),
    Tool("add_event", "Put an event into the calendar",
         (P("title", "string", "phrase"), P("date", "string", "date"), P("time", "string", "time", optional=True)),
         ("Add \"{title}\" to my calendar on {date}.", "Put \"{title}\" into my calendar on {date} at {time}."),
         (("status", "saved"),), "I put \"{title}\" into the calendar on {date}."),
    Tool("list_events", "List the events of a day", (P("date", "string", "date"),),
         ("What do I have on {date}?", "Show my calendar for {date}."), (("title", "phrase"), ("time", "time")),
         "On {date} there is \"{title}\" at {time}."),
    Tool("send_email", "Send an email", (P("to", "string", "mail"), P("subject", "string", "phrase"), P("body", "string", "sentence")),
         ("Send an email to {to} with the subject \"{subject}\" and the text \"{body}\".",
          "Write to {to}: subject \"{subject}\", text \"{body}\"."), (("status", "sent"),), "The email to {to} is sent."),
    Tool("send_message", "Send a text message", (P("person", "string", "person"), P("text", "string", "sentence")),
         ("Tell {person}: \"{text}\".", "Send {person} a message: \"{text}\".", "Text {person} \"{text}\"."),
         (("status", "delivered"),), "The message to {person} is delivered."),
    Tool("call_person", "Make a phone call", (P("person", "string", "person"),), ("Call {person}.", "Please phone {person}."),
         (("status", "ringing"),), "I am calling {person}."),
    Tool("search_web", "Search the web", (P("query", "string", "phrase"), P("limit", "integer", "small", optional=True)),
         ("Search the web for \"{query}\".", "Find {limit} results for \"{query}\" on the web.", "Look up \"{query}\" online."),
         (("title", "phrase"),), "The first result is \"{title}\"."),
    Tool("search_files", "Search files by their text", (P("pattern", "string", "word"), P("folder", "string", "word", optional=True)),
         ("Which files contain \"{pattern}\"?", "Search the folder {folder} for \"{pattern}\"."), (("file", "file"),),
         "I found it in {file}."),
    Tool("read_file", "Read a file", (P("path", "string", "file"),), ("Open {path}.", "What is in {path}?", "Read the file {path}."),
         (("content", "sentence"),), "The file says: {content}"),
    Tool("write_file", "Write text into a file", (P("path", "string", "file"), P("content", "string", "sentence")),
         ("Write \"{content}\" into {path}.", "Save \"{content}\" as {path}."), (("status", "written"),), "{path} is written."),
    Tool("delete_file", "Delete a file", (P("path", "string", "file"),), ("Delete {path}.", "Remove the file {path}."),
         (("status", "deleted"),), "{path} is deleted."),
    Tool("move_file", "Move or rename a file", (P("source", "string", "file"), P("target", "string", "file")),
         ("Rename {source} to {target}.", "Move {source} to {target}."), (("status", "moved"),), "{source} is now {target}."),
    Tool("list_files", "List a folder", (P("folder", "string", "word"),), ("What is in the folder {folder}?", "List {folder}."),
         (("file", "file"),), "There is {file}."),
    Tool("run_command", "Run a shell command", (P("command", "string", ("ls -l", "git status", "df -h", "uptime", "whoami", "date",
         "make test", "git pull", "ps aux", "free -m")),), ("Run `{command}`.", "Please execute `{command}`."),
         (("output", "word"),), "The output is: {output}"),
    Tool("calculate", "Evaluate an arithmetic expression", (P("expression", "string", "expression"),),
         ("Use the calculator: {expression}", "Calculate {expression} with the tool."), (("value", "big"),), "{expression} = {value}."),
    Tool("translate", "Translate a text", (P("text", "string", "sentence"), P("language", "string", LANGUAGE)),
         ("Translate \"{text}\" into {language}.", "How do you say \"{text}\" in {language}?"), (("translation", "word"),),
         "In {language} that is \"{translation}\"."),
    Tool("define_word", "Look a word up in a dictionary", (P("word", "string", "thing"),),
         ("Look up the word {word}.", "Find {word} in the dictionary."), (("definition", "sentence"),), "{definition}."),
    Tool("turn_light", "Switch a lamp", (P("room", "string", ROOM), P("on", "boolean", "bool")),
         ("Turn the light in the {room} {on}.", "Switch the {room} light {on}."), (("status", "ok"),), "The light in the {room} is {on}."),
    Tool("dim_light", "Set the brightness of a lamp", (P("room", "string", ROOM), P("percent", "integer", "percent")),
         ("Dim the light in the {room} to {percent} percent.", "Set the {room} light to {percent}%."), (("status", "ok"),),
         "The {room} light is at {percent} percent."),
    Tool("set_heating", "Set the temperature of a room", (P("room", "string", ROOM), P("degrees", "integer", "small_degrees")),
         ("Heat the {room} to {degrees} degrees.", "Set the heating in the {room} to {degrees}."), (("status", "ok"),),
         "The {room} will be {degrees} degrees warm."),
    Tool("lock_door", "Lock or unlock a door", (P("door", "string", ("front door", "back door", "garage", "gate")),
         P("lock", "boolean", "bool")), ("Set the lock of the {door}: {lock}.", "Lock the {door}: {lock}."), (("status", "ok"),), "The {door} is done."),
    Tool("play_music", "Play music", (P("query", "string", "music"), P("shuffle", "boolean", "bool", optional=True)),
         ("Play {query}.", "I want to hear {query}.", "Play {query}, shuffle {shuffle}."), (("status", "playing"),), "Now playing {query}."),
    Tool("set_volume", "Set the volume", (P("percent", "integer", "percent"),), ("Set the volume to {percent}.", "Volume {percent} percent."),
         (("status", "ok"),), "The volume is {percent} percent."),
    Tool("add_to_list", "Add things to a shopping list", (P("items", "array", "list"),),
         ("Put {items} on the shopping list.", "I need {items}."), (("count", "small"),), "The list has {count} entries now."),
    Tool("book_table", "Reserve a restaurant table", (P("restaurant", "string", "restaurant"), P("people", "integer", "small"),
         P("time", "string", "time")), ("Book a table for {people} at {restaurant} at {time}.",
         "Reserve {restaurant} for {people} people at {time}."), (("code", "code"),), "The table at {restaurant} is booked, code {code}."),
    Tool("book_flight", "Book a flight", (P("source", "string", "city"), P("target", "string", "city"), P("date", "string", "date")),
         ("Book a flight from {source} to {target} on {date}.", "I want to fly from {source} to {target} on {date}."),
         (("code", "code"),), "The flight to {target} is booked, code {code}."),
    Tool("find_train", "Find a train connection", (P("source", "string", "city"), P("target", "string", "city"),
         P("time", "string", "time", optional=True)), ("When does a train go from {source} to {target}?",
         "Find a train from {source} to {target} after {time}."), (("departure", "time"),), "A train to {target} leaves at {departure}."),
    Tool("book_hotel", "Book a hotel room", (P("city", "string", "city"), P("nights", "integer", "small"), P("date", "string", "date")),
         ("Book a hotel in {city} for {nights} nights from {date}.", "I need a room in {city} on {date}, {nights} nights."),
         (("hotel", "restaurant"),), "You have a room in {hotel}."),
    Tool("get_route", "Directions between two places", (P("source", "string", "city"), P("target", "string", "city"),
         P("mode", "string", ("car", "bike", "foot", "train"))), ("How do I get from {source} to {target} by {mode}?",
         "Route from {source} to {target} by {mode}."), (("minutes", "number"),), "It takes {minutes} minutes by {mode}."),
    Tool("get_stock_price", "Price of a stock", (P("symbol", "string", "symbol"),), ("What is the price of {symbol}?",
         "How does the stock {symbol} stand?"), (("price", "amount"),), "{symbol} stands at {price}."),
    Tool("track_parcel", "Where a parcel is", (P("number", "string", "code"),), ("Where is my parcel {number}?", "Track {number}."),
         (("place", "city"),), "The parcel {number} is in {place}."),
    Tool("create_ticket", "Open a support ticket", (P("title", "string", "sentence"), P("priority", "string", ("low", "normal", "high"))),
         ("Open a ticket with {priority} priority: \"{title}\".", "Create a {priority} ticket \"{title}\"."), (("id", "code"),),
         "The ticket {id} is open."),
    Tool("close_ticket", "Close a support ticket", (P("id", "string", "code"),), ("Close ticket {id}.", "The ticket {id} is solved, close it."),
         (("status", "closed"),), "The ticket {id} is closed."),
    Tool("get_user", "Data of a user", (P("id", "integer", "big"),), ("Who is user {id}?", "Show me user {id}."), (("name", "person"),),
         "User {id} is {name}."),
    Tool("create_user", "Create a user", (P("name", "string", "person"), P("email", "string", "mail"), P("admin", "boolean", "bool", optional=True)),
         ("Create a user {name} with the email {email}.", "Add {name}, {email}, admin {admin}."), (("id", "big"),), "{name} has the id {id}."),
    Tool("query_database", "Run a read-only SQL query", (P("sql", "string", "sql"),), ("Run the query: {sql}", "Ask the database: {sql}"),
         (("rows", "number"),), "The query gives {rows} rows."),
    Tool("get_page", "Fetch a web page", (P("url", "string", "url"),), ("Fetch {url}.", "What does {url} say?"), (("text", "sentence"),),
         "The page says: {text}"),
    Tool("make_note", "Keep a note", (P("text", "string", "sentence"),), ("Note: {text}", "Remember this: {text}"), (("id", "number"),),
         "I kept that as note {id}."),
    Tool("find_note", "Search the notes", (P("query", "string", "phrase"),), ("Find my note about {query}.", "Search my notes for {query}."),
         (("text", "sentence"),), "The note says: {text}"),
    Tool("set_reminder", "Remind of something at a time", (P("text", "string", "sentence"), P("time", "string", "time")),
         ("Remind me at {time}: {text}.", "At {time}, remind me: {text}."), (("status", "set"),), "I will remind you at {time}."),
    Tool("find_recipe", "Find a recipe", (P("ingredient", "string", "food"), P("minutes", "integer", "minutes", optional=True)),
         ("Find a recipe with {ingredient}.", "What can I cook with {ingredient} in {minutes} minutes?"), (("title", "phrase"),),
         "Try \"{title}\"."),
    Tool("order_food", "Order food", (P("dish", "string", "food"), P("count", "integer", "small")), ("Order {count} {dish}.",
         "I would like {count} portions of {dish}."), (("minutes", "minutes"),), "The {dish} comes in {minutes} minutes."),
    Tool("get_population", "Population of a city", (P("city", "string", "city"),), ("How many people live in {city}?",
         "What is the population of {city}?"), (("people", "big"),), "{people} people live in {city}."),
    Tool("get_distance", "Distance between two cities", (P("source", "string", "city"), P("target", "string", "city")),
         ("How far is it from {source} to {target}?", "Distance between {source} and {target}?"), (("km", "number"),),
         "It is {km} kilometres from {source} to {target}."),
    Tool("generate_password", "Make a random password", (P("length", "integer", "length"), P("digits", "boolean", "bool", optional=True)),
         ("Make a password with {length} characters.", "A password of {length} characters, digits {digits}."), (("password", "code"),),
         "The password is {password}."),
    Tool("roll_dice", "Roll dice", (P("count", "integer", "small"), P("sides", "integer", "length")), ("Roll {count} dice with {sides} sides.",
         "Throw {count} dice, {sides} sides each."), (("total", "small"),), "You rolled {total}."),
    Tool("random_number", "A random number in a range", (P("low", "integer", "small"), P("high", "integer", "big")),
         ("Give me a random number from {low} to {high}.", "A random number between {low} and {high}."), (("value", "number"),), "{value}."),
    Tool("resize_image", "Resize an image", (P("path", "string", "file"), P("width", "integer", "number"), P("height", "integer", "number")),
         ("Resize {path} to {width} by {height}.", "Make {path} {width}x{height}."), (("status", "ok"),), "{path} is {width}x{height} now."),
    Tool("set_color", "Set the colour of a thing", (P("thing", "string", "thing"), P("color", "string", tuple(words.COLORS))),
         ("Paint the {thing} {color}.", "Make the {thing} {color}."), (("status", "ok"),), "The {thing} is {color} now."),
    Tool("feed_animal", "Feed an animal", (P("animal", "string", "pet"), P("grams", "integer", "number")), ("Give the {animal} {grams} grams of food.",
         "Feed the {animal} with {grams} grams."), (("status", "fed"),), "The {animal} has eaten."),
    Tool("water_plant", "Water a plant", (P("plant", "string", "plant"), P("litres", "integer", "small")), ("Give the {plant} {litres} litres of water.",
         "Water the {plant} with {litres} litres."), (("status", "ok"),), "The {plant} is watered."),
    Tool("open_app", "Open an application", (P("app", "string", ("camera", "calendar", "mail", "maps", "music", "notes", "settings")),),
         ("Open the {app}.", "Start the app {app}."), (("status", "open"),), "The {app} is open."),
    Tool("take_photo", "Take a photo", (P("camera", "string", ("front", "back")), P("flash", "boolean", "bool", optional=True)),
         ("Take a photo with the {camera} camera.", "Photo with the {camera} camera, flash {flash}."), (("file", "file"),), "The photo is in {file}."),
    Tool("get_news", "Headlines on a topic", (P("topic", "string", ("sports", "science", "politics", "music", "business", "health")),
         P("limit", "integer", "small", optional=True)), ("What is new in {topic}?", "Give me {limit} headlines about {topic}."),
         (("title", "sentence"),), "The first headline: {title}."),
    Tool("rate_movie", "Rate a film", (P("title", "string", "phrase"), P("stars", "integer", "stars")), ("Give \"{title}\" {stars} stars.",
         "Rate \"{title}\" with {stars}."), (("status", "saved"),), "\"{title}\" has {stars} stars."),
    Tool("pay_invoice", "Pay an invoice", (P("number", "string", "code"), P("amount", "number", "amount")), ("Pay invoice {number} over {amount}.",
         "Transfer {amount} for invoice {number}."), (("status", "paid"),), "Invoice {number} is paid."),
    Tool("get_balance", "Balance of an account", (P("account", "string", "code"),), ("What is the balance of {account}?", "How much is on {account}?"),
         (("balance", "amount"),), "There is {balance} on {account}."),
    Tool("restart_service", "Restart a service", (P("name", "string", "word"), P("force", "boolean", "bool", optional=True)),
         ("Restart {name}.", "Restart the service {name}, force {force}."), (("status", "running"),), "{name} is running again."),
    Tool("get_logs", "Last lines of a log", (P("service", "string", "word"), P("lines", "integer", "number")), ("Show {lines} lines of the log of {service}.",
         "The last {lines} log lines of {service}."), (("line", "sentence"),), "The last line: {line}"),
    Tool("scale_deployment", "Set the number of replicas", (P("name", "string", "word"), P("replicas", "integer", "small")),
         ("Scale {name} to {replicas} replicas.", "Run {replicas} copies of {name}."), (("status", "ok"),), "{name} has {replicas} replicas."),
    Tool("invite_people", "Invite people to an event", (P("people", "array", "names"), P("event", "string", "phrase")),
         ("Invite {people} to \"{event}\".", "Ask {people} to come to \"{event}\"."), (("count", "small"),), "{count} people are invited."),
    Tool("set_status", "Set the own status", (P("text", "string", "word"), P("minutes", "integer", "minutes", optional=True)),
         ("Set my status to {text}.", "My status is {text} for {minutes} minutes."), (("status", "ok"),), "Your status is {text}."),
)  # fmt: skip

VALUES |= {
    "expression": lambda rng: f"{rng.randint(2, 999)}{rng.choice('+-*/')}{rng.randint(2, 99)}",
    "small_degrees": _number(12, 26), "length": _number(4, 32), "stars": _number(1, 5),
    "music": _pick(("jazz", "piano music", "a waltz", "rain sounds", "a lullaby", "rock", "the news", "folk songs", "opera")),
    "restaurant": lambda rng: f"{rng.choice(('Golden', 'Blue', 'Old', 'Green'))} {rng.choice(words.PETS).capitalize()}",
    "symbol": lambda rng: "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, 4))),
    "sql": lambda rng: f"SELECT {_word(rng)} FROM {_word(rng)} WHERE id = {rng.randint(1, 9999)}",
    "url": lambda rng: f"https://{_word(rng)}.example/{rng.choice(('', _word(rng)))}",
}  # fmt: skip


def shown(value: Any, name: str = "") -> str:
    """An argument as a person says it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(value[:-1]) + f" and {value[-1]}"
    return str(value)


def result_of(tool: Tool, rng: random.Random) -> dict[str, Any]:
    """A made-up result."""
    return {key: VALUES[value](rng) if value in VALUES else value for key, value in tool.result}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
