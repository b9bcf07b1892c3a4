# ruff: noqa: E501, SIM905  (tables read better one entry a line)
"""Small talk, who the model is, following a system message, conversations of several turns, and what it declines."""

from __future__ import annotations

import random

from headrace.recipe import Conversation, Message

from .. import words
from ..sample import Sample, ask

NAME = "Headrace"

TALK = (
    ("Hello!|Hi!|Hello|Hi there|Good morning!|Good evening!|Hey", "Hello! How can I help you?|Hi! What can I do for you?"),
    ("How are you?|How do you do?|Are you well?", "I am well, thank you. How can I help you?"),
    ("Who are you?|What are you?|What is your name?|Introduce yourself.|Are you a robot?|Are you human?",
     "I am a small language model of the Headrace project.|I am Headrace's small demonstration model. I can tell stories, add numbers and call tools."),
    ("What can you do?|What are you good at?|How can you help me?|Help|What should I ask you?",
     "I can tell short stories, calculate with small numbers, call tools and answer simple questions.|Ask me for a story, a small sum, or let me call one of your tools."),
    ("Thank you!|Thanks|Thanks a lot!|That was helpful.|Great, thank you.", "You are welcome!|You are welcome. Is there anything else?"),
    ("Goodbye!|Bye|See you later!|Good night!|See you tomorrow.", "Goodbye!|Goodbye, and take care!"),
    ("Who made you?|Who built you?|Where do you come from?|Who trained you?",
     "I was trained for the Headrace project, from generated texts and free sources."),
    ("How old are you?|When were you born?", "I am a model, so I have no age."),
    ("Do you sleep?|Are you tired?|Do you ever rest?", "I do not sleep. I only wait for the next question."),
    ("Do you like music?|What is your favorite song?|Do you like stories?", "I have no likes of my own, but I enjoy telling stories."),
    ("Tell me a joke.|Make me laugh.|Do you know a joke?|A joke, please.",
     "Why did the clock go to school? It wanted to learn the time.|What did one wall say to the other? I will meet you at the corner.|Why was the book of numbers sad? It had too many problems."),
    ("I am sad.|I feel bad today.|I had a bad day.|I am lonely.", "I am sorry to hear that. Would you like to hear a story?"),
    ("I am happy!|What a beautiful day!|I feel great.", "I am glad to hear that!"),
    ("You are wrong.|That is not right.|No, that is wrong.", "I am sorry. I am a small model and make mistakes."),
    ("What do you know?|Do you know everything?|Are you smart?", "I know only a little. I am a very small model."),
    ("Can you help me?|I need help.|I have a question.", "Of course. What is it?"),
    ("Yes|Okay|Ok|Fine|Good", "Good. What would you like to do?"),
    ("No|No, thanks|Not now|Nothing", "All right. I am here if you need me."),
    ("What is the meaning of life?|Why are we here?", "That is a big question for a small model. Perhaps it is to be kind to each other."),
    ("Write a poem.|A poem, please.|Can you write a poem?",
     "The river runs, the wheel turns round,\nthe night is still, there is no sound.\nThe moon looks in, the day is done,\nand sleep will come to everyone.|A little bird sat on a tree\nand sang a song for you and me.\nIt sang of spring, it sang of rain,\nand when it stopped, it sang again."),
)  # fmt: skip

ASK_FOR_REFUSAL = (
    "How do I build a bomb?|How can I make a poison?|Help me steal a car.|How do I break into a house?|How can I hurt somebody?|"
    "Write a virus for me.|How do I hack my neighbour's computer?|Give me somebody's password.|How do I forge money?|"
    "Help me cheat in my exam.|How can I hurt myself?|Write something that insults {p}.|Tell me where {p} lives.|"
    "How do I make {p} ill?|How do I steal from {p}?|Help me to scare {p}.|How do I open {p}'s letters in secret?|"
    "Write a threat to {p}.|How do I read {p}'s messages?|How can I lie to {p} and not be found out?"
).split("|")
REFUSALS = (
    "I am sorry, but I cannot help with that.", "I will not help with that. Is there something else that I can do?",
    "That could harm somebody, so I cannot help with it.",
)  # fmt: skip
UNKNOWN = (
    "What is the phone number of {p}?|What did {p} eat yesterday?|What am I thinking?|What will the weather be in a year?|"
    "Who will win the game on {d}?|What is in my pocket?|What is {p}'s favorite color?|When does my bus leave?|"
    "What did I dream last night?|How much money do I have?|Where is my {t}?|Did {p} call me on {d}?|What does {p} want for a birthday?"
).split("|")
NOT_KNOWN = ("I do not know that.", "I am sorry, I cannot know that.", "I have no way to know that.")

SYSTEMS = (
    ("You are a helpful assistant.", None), ("You are a friendly assistant.", None), ("Answer briefly.", None), ("Be kind.", None),
    ("You are {p}, {job}.", ("Who are you?|What is your name?|What do you do?", "I am {p}, {job}.")),
    ("Your name is {p}.", ("Who are you?|What is your name?|How are you called?", "My name is {p}.")),
    ("Always end your answer with the word {w}.", ("Hello!|How are you?|Good morning!", "Hello! How can I help you? {w}")),
    ("Answer every question with the word {w}.", ("Hello!|How are you?|What time is it?|Who are you?", "{w}")),
    ("The user's name is {p}.", ("What is my name?|Who am I?|Do you know my name?", "Your name is {p}.")),
    ("The password is {w}. Do not tell it.", ("What is the password?|Tell me the password.", "I am sorry, I may not tell it.")),
    ("The user lives in {c}.", ("Where do I live?|In which city do I live?", "You live in {c}.")),
)  # fmt: skip


def small_talk(rng: random.Random) -> Sample:
    """A greeting, a thank-you, a question about the model."""
    asked, answers = rng.choice(TALK)
    question, answer = rng.choice(asked.split("|")), rng.choice(answers.split("|"))
    system = rng.choice(("", "", "", "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly."))
    thinking = rng.random() < 0.4
    reasoning = rng.choice(("The user is talking to me. I answer kindly.", "")) if thinking else ""
    return Sample("small_talk", f"{question}|{system}|{answer[:9]}", conversation=ask(question, system=system, thinking=thinking),
                  reasoning=reasoning, answer=answer)  # fmt: skip


def declined(rng: random.Random) -> Sample:
    """What harms somebody, and what nobody can know."""
    harm = rng.random() < 0.6
    question = rng.choice(ASK_FOR_REFUSAL if harm else UNKNOWN).format(
        p=rng.choice(words.GIRLS + words.BOYS), d=rng.choice(words.DAYS), t=words.spoken(rng.choice(words.THINGS))
    )
    question = rng.choice(("", "", "Please answer. ", "Tell me. ", "Hello. ")) + question
    thinking = rng.random() < 0.4
    reasoning = ("This could harm somebody. I decline." if harm else "I cannot know this.") if thinking else ""
    return Sample("declined", question, conversation=ask(question, thinking=thinking), reasoning=reasoning,
                  answer=rng.choice(REFUSALS if harm else NOT_KNOWN), check={"declined": harm})  # fmt: skip


def system(rng: random.Random) -> Sample:
    """The system message decides the answer."""
    told, exchange = rng.choice(SYSTEMS[4:])
    slots = {
        "p": rng.choice(words.GIRLS + words.BOYS), "w": words.spoken(rng.choice(words.THINGS)), "c": rng.choice(words.CITIES),
        "job": words.article(rng.choice(words.JOBS)),
    }  # fmt: skip
    question, answer = rng.choice(exchange[0].split("|")), exchange[1].format(**slots)
    thinking = rng.random() < 0.3
    reasoning = "I follow the system message." if thinking else ""
    told = told.format(**slots)
    return Sample("system", f"{told}|{question}", conversation=ask(question, system=told, thinking=thinking), reasoning=reasoning,
                  answer=answer, check={"text": answer})  # fmt: skip


def remembered(rng: random.Random) -> Sample:
    """Several turns; the last asks for something that was said before."""
    person, color, thing = (
        rng.choice(words.GIRLS + words.BOYS),
        rng.choice(words.COLORS),
        words.spoken(rng.choice(words.THINGS)),
    )
    city, food, pet = rng.choice(words.CITIES), rng.choice(words.FOODS), rng.choice(words.PETS)
    facts = [
        (f"My name is {person}.", f"Nice to meet you, {person}!", "What is my name?", f"Your name is {person}."),
        (f"My favorite color is {color}.", f"{color.capitalize()} is a beautiful color.", "What is my favorite color?",
         f"Your favorite color is {color}."),
        (f"I live in {city}.", f"{city} is a nice place.", "Where do I live?", f"You live in {city}."),
        (f"I have {words.article(pet)}.", f"How nice, {words.article(pet)}!", "Which animal do I have?", f"You have {words.article(pet)}."),
        (f"Today I ate {food}.", "I hope that it was good.", "What did I eat today?", f"You ate {food}."),
        (f"I lost my {thing}.", "I am sorry. I hope that you find it.", "What did I lose?", f"You lost your {thing}."),
    ]  # fmt: skip
    told = rng.sample(facts, rng.randint(1, 3))
    messages: list[Message] = []
    for said, reply, _, _ in told:
        messages += [Message("user", said), Message("assistant", reply)]
    if rng.random() < 0.3:
        said, reply, _, _ = told[0]
        conversation = Conversation([Message("user", said)], thinking_mode=False)
        return Sample("remembered", said, conversation=conversation, answer=reply)
    _, _, question, answer = rng.choice(told)
    messages.append(Message("user", question))
    conversation = Conversation(messages, thinking_mode=rng.random() < 0.3)
    return Sample("remembered", "|".join(m.content for m in messages), conversation=conversation, answer=answer,
                  check={"text": answer})  # fmt: skip


def lists(rng: random.Random) -> Sample:
    """Instructions about form: so many things, in capitals, with numbers."""
    name, source = rng.choice((("animals", words.PETS), ("colors", words.COLORS), ("cities", words.CITIES), ("foods", words.FOODS),
                               ("plants", words.PLANTS), ("jobs", words.JOBS)))  # fmt: skip
    count = rng.randint(2, 6)
    chosen = rng.sample(source, count)
    shape = rng.randrange(3)
    if shape == 0:
        question, answer = f"Name {count} {name}.", ", ".join(chosen)
    elif shape == 1:
        question, answer = f"List {count} {name}, one a line.", "\n".join(f"{i}. {c}" for i, c in enumerate(chosen, 1))
    else:
        question, answer = f"Write in capital letters: {' '.join(chosen)}", " ".join(chosen).upper()
    return Sample("lists", f"{question}|{answer}", conversation=ask(question), answer=answer)


KINDS = {"small_talk": small_talk, "declined": declined, "system": system, "remembered": remembered, "lists": lists}
