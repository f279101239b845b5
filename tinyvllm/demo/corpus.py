"""The corpus of the demonstration model: an endless, seeded stream of documents of five kinds.

`documents(seed, split)` yields stories, prose and questions about Willowmere, arithmetic, chats, and JSON records. Python's standard
library alone makes them, so the same seed gives the same text on every machine.

Held out, never in the split "train": one question in twelve about Willowmere and one sum in twelve (chosen by a checksum of the question
or of the numbers, so that the fact itself is still told in prose and asked in other words), and every document of another seed.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from tinyvllm.demo import stories
from tinyvllm.demo.stories import fill, tidy
from tinyvllm.demo.world import DAYS, FACTS, GENERAL, MONTHS, PEOPLE, PLACES, RELATIVES, SEASONS, VILLAGE, Person, Place

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
KINDS = ("story", "world", "arithmetic", "chat", "json")
# Shares of documents. Stories are long, and chats tell some too, so stories are nearly half of the tokens.
SHARES = {"story": 0.21, "world": 0.28, "arithmetic": 0.17, "chat": 0.24, "json": 0.10}


@dataclass(frozen=True)
class Document:
    """Plain text, or the turns of a chat as (role, content)."""

    kind: str
    text: str = ""
    turns: tuple[tuple[str, str], ...] = ()

    def render(self) -> str:
        """The document with its special tokens, without the BOS that the tokenizer puts in front."""
        if self.turns:
            return "".join(f"{ROLES[role]}{content}{END}" for role, content in self.turns)
        return self.text + END


@dataclass(frozen=True)
class Asked:
    """A question, its answer in a word or two, and the answer in a sentence. `key` decides whether it is held out."""

    question: str
    short: str
    full: str
    key: str = ""


def held_out(key: str) -> bool:
    return bool(key) and zlib.crc32(key.encode()) % 12 == 0


def low(text: str) -> str:
    return text[:1].lower() + text[1:]


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def joined(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def plural_of(noun: str) -> str:
    return noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith("ch") else "s")


def an(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


# ---- Willowmere: questions ----

# relation: (questions, short answer, full answers); words are those of `_person_words`
PERSON: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "job": (
        (
            "What is {n}'s job?",
            "What does {n} do?",
            "What is the job of {n}?",
            "What does {n} do for a living?",
            "What work does {n} do?",
            "What is {n} by trade?",
        ),
        "{job}",
        ("{n} is {a_job}.", "{n} is {a_job}. {He} {work}."),
    ),
    "age": (
        ("How old is {n}?", "What is {n}'s age?", "What is the age of {n}?", "How many years old is {n}?", "What age is {n}?"),
        "{age}",
        ("{n} is {age} years old.",),
    ),
    "home": (
        (
            "Where does {n} live?",
            "Where is {n}'s home?",
            "Where is the home of {n}?",
            "In which place does {n} live?",
            "Where can I find {n}'s house?",
        ),
        "{home}",
        ("{n} lives {home}.",),
    ),
    "pet": (
        (
            "What pet does {n} have?",
            "Which animal does {n} have?",
            "What animal lives with {n}?",
            "What kind of pet has {n} got?",
            "Does {n} have a pet?",
            "What is {n}'s pet?",
        ),
        "{a_pet}",
        ("{n} has {a_pet} called {petname}.", "{n}'s pet is {a_pet} called {petname}."),
    ),
    "petname": (
        (
            "What is the name of {n}'s {pet}?",
            "What is {n}'s {pet} called?",
            "How is {n}'s {pet} called?",
            "What is the name of {n}'s pet?",
            "What is {n}'s pet called?",
        ),
        "{petname}",
        ("{n}'s {pet} is called {petname}.",),
    ),
    "food": (
        (
            "What does {n} like to eat?",
            "What is {n}'s favourite food?",
            "What is the favourite food of {n}?",
            "Which food does {n} like best?",
            "What does {n} like to eat most of all?",
        ),
        "{food}",
        ("{n}'s favourite food is {food}.", "{n} likes {food} best."),
    ),
    "colour": (
        (
            "What is {n}'s favourite colour?",
            "Which colour does {n} like best?",
            "What is the favourite colour of {n}?",
            "What colour does {n} like?",
        ),
        "{colour}",
        ("{n}'s favourite colour is {colour}.", "{n} likes {colour} best."),
    ),
    "hobby": (
        (
            "What does {n} like to do?",
            "What is {n}'s hobby?",
            "What is the hobby of {n}?",
            "What does {n} do in {his} free time?",
            "What does {n} enjoy?",
        ),
        "{hobby}",
        ("{n} likes {hobby}.", "{n}'s hobby is {hobby}."),
    ),
    "who": (
        ("Who is {n}?", "Tell me about {n}.", "What do you know about {n}?", "Can you tell me something about {n}?", "Do you know {n}?"),
        "{a_job}",
        (
            "{n} is {a_job} in Willowmere. {He} is {age} years old and lives {home}. {He} has {a_pet} called {petname}.",
            "{n} is {a_job} in Willowmere. {He} lives {home} and likes {hobby}. {His} favourite food is {food}.",
        ),
    ),
    "by_pet": (
        (
            "Who has {a_pet}?",
            "Whose pet is {petname}?",
            "Who has {a_pet} called {petname}?",
            "To whom does {petname} the {pet} belong?",
            "Who is the owner of {petname}?",
        ),
        "{n}",
        ("{n} has {a_pet} called {petname}.", "{petname} the {pet} belongs to {n}."),
    ),
    "by_food": (
        ("Who likes {food} best?", "Whose favourite food is {food}?", "Who loves to eat {food}?"),
        "{n}",
        ("{n} likes {food} best.",),
    ),
    "by_colour": (
        ("Whose favourite colour is {colour}?", "Who likes the colour {colour}?", "Who likes {colour} best?"),
        "{n}",
        ("{n}'s favourite colour is {colour}.",),
    ),
    "by_hobby": (("Who likes {hobby}?", "Whose hobby is {hobby}?", "Who enjoys {hobby}?"), "{n}", ("{n} likes {hobby}.",)),
    "pet_kind": (
        ("What kind of animal is {petname}?", "What animal is {petname}?", "Who is {petname}?", "What is {petname}?"),
        "{a_pet}",
        ("{petname} is {a_pet}. {He_pet} belongs to {n}.",),
    ),
}
BY_JOB = (
    "Who is the {job} of Willowmere?",
    "Who is the {job}?",
    "What is the name of the {job}?",
    "Who works as {a_job} in Willowmere?",
    "What is the {job} called?",
    "Who {work}?",
)
PLACE: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "where": (
        ("Where is {p}?", "Where can I find {p}?", "Where does {p} stand?", "Where do I find {p} in Willowmere?"),
        "{where}",
        ("{P} is {where}.",),
    ),
    "near": (
        ("What is next to {p}?", "What lies next to {p}?", "What is near {p}?", "Which place is next to {p}?"),
        "{near}",
        ("{P} is next to {near}.",),
    ),
    "has": (
        ("What is there in {p}?", "What can I see at {p}?", "What is special about {p}?", "What does {p} have?"),
        "{has}",
        ("At {p} you can see {has}.",),
    ),
    "use": (
        ("Why do people go to {p}?", "What do people do at {p}?", "What can I do at {p}?", "What is {p} for?"),
        "to {use}",
        ("People go to {p} to {use}.",),
    ),
}


def _person_words(p: Person) -> dict[str, str]:
    return {
        "n": p.name,
        "job": p.job,
        "a_job": an(p.job),
        "age": str(p.age),
        "home": p.home,
        "pet": p.pet,
        "a_pet": an(p.pet),
        "petname": p.pet_name,
        "food": p.food,
        "colour": p.colour,
        "hobby": p.hobby,
        "work": p.work,
        "He": "She" if p.she else "He",
        "he": "she" if p.she else "he",
        "his": "her" if p.she else "his",
        "His": "Her" if p.she else "His",
        "He_pet": "It",
    }


def _place_words(p: Place) -> dict[str, str]:
    return {"p": p.name, "P": cap(p.name), "where": p.where, "near": p.near, "has": p.has, "use": p.use}


def about_people(rng: random.Random) -> Asked:
    p = rng.choice(PEOPLE)
    words = _person_words(p)
    if rng.random() < 0.12 and p.job != "pupil":
        form = rng.choice(BY_JOB)
        return Asked(fill(rng, form, words), p.name, fill(rng, "The {job} of Willowmere is {n}.", words), f"{p.name}/by_job/{form}")
    if rng.random() < 0.12:
        who, relation, whom = rng.choice(RELATIVES)
        form = rng.choice(("Who is the {r} of {b}?", "Who is {b}'s {r}?", "What is the name of {b}'s {r}?", "How is {a} related to {b}?"))
        asked = fill(rng, form, {"r": relation, "a": who, "b": whom})
        short = f"the {relation} of {whom}" if form.startswith("How") else who
        return Asked(asked, short, f"{who} is the {relation} of {whom}.", asked)
    relation = rng.choice(tuple(PERSON))
    forms, short, fulls = PERSON[relation]
    form = rng.choice(forms)
    full = fulls[1] if form.startswith("Does") else rng.choice(fulls)
    if form.startswith("Does"):
        full = "Yes, " + fulls[0]
    return Asked(fill(rng, form, words), fill(rng, short, words), fill(rng, full, words), f"{p.name}/{relation}/{form}")


def about_places(rng: random.Random) -> Asked:
    p = rng.choice(PLACES)
    relation = rng.choice(tuple(PLACE))
    forms, short, fulls = PLACE[relation]
    form = rng.choice(forms)
    words = _place_words(p)
    return Asked(fill(rng, form, words), fill(rng, short, words), fill(rng, rng.choice(fulls), words), f"{p.name}/{relation}/{form}")


def yes_or_no(rng: random.Random) -> Asked:
    p = rng.choice(PEOPLE)
    right = rng.random() < 0.5
    q = p if right else rng.choice(PEOPLE)
    relation = rng.choice(("job", "pet", "home", "age", "colour"))
    asked, fact, same = {
        "job": (f"Is {p.name} {an(q.job)}?", f"{p.name} is {an(p.job)}.", p.job == q.job),
        "pet": (f"Does {p.name} have {an(q.pet)}?", f"{p.name} has {an(p.pet)}.", p.pet == q.pet),
        "home": (f"Does {p.name} live {q.home}?", f"{p.name} lives {p.home}.", p.home == q.home),
        "age": (f"Is {p.name} {q.age} years old?", f"{p.name} is {p.age} years old.", p.age == q.age),
        "colour": (f"Is {q.colour} {p.name}'s favourite colour?", f"{p.name}'s favourite colour is {p.colour}.", p.colour == q.colour),
    }[relation]
    answer = "Yes" if same else "No"
    return Asked(asked, answer, f"{answer}, {fact}", asked)


def older(rng: random.Random) -> Asked:
    a, b = rng.sample(PEOPLE, 2)
    big, small = (a, b) if a.age > b.age else (b, a)
    if rng.random() < 0.5:
        asked = f"Who is older, {a.name} or {b.name}?"
        return Asked(asked, big.name, f"{big.name} is older. {big.name} is {big.age} and {small.name} is {small.age}.", asked)
    asked = f"Who is younger, {a.name} or {b.name}?"
    return Asked(asked, small.name, f"{small.name} is younger. {small.name} is {small.age} and {big.name} is {big.age}.", asked)


def about_facts(rng: random.Random) -> Asked:
    return Asked(*rng.choice(FACTS))


def about_anything(rng: random.Random) -> Asked:
    return Asked(*rng.choice(GENERAL))


DO_NOT_KNOW = (
    "I do not know that.",
    "I am sorry, I do not know.",
    "I do not know that. I am only a very small model.",
    "That I do not know. I only know Willowmere and a few simple things.",
    "I am not sure, so I would rather not guess.",
    "I do not know. I am a very small model, and I know very little of the big world.",
)
OUTSIDE = (
    "What is the capital of [France|Spain|Japan|Norway|Brazil|Egypt|Kenya|Canada|Peru|Poland]?",
    "Who is the [king|president|prime minister|queen] of [France|Spain|England|Sweden|Italy|India]?",
    "Who wrote [the Odyssey|Hamlet|Faust|that book|the national anthem]?",
    "How far is it to [the moon|the sun|Mars|Paris|London|China]?",
    "What is the [weather|news|temperature] [today|tomorrow|in Berlin|in London]?",
    "What time is it?",
    "How tall is [the Eiffel Tower|Mount Everest|the tallest tree]?",
    "Who won the [world cup|election|last war]?",
    "What is the [meaning of life|speed of light|price of gold|stock market doing]?",
    "How does [a computer|an engine|a television|a rocket|the internet] work?",
    "Can you explain [quantum physics|relativity|chemistry|economics|philosophy]?",
    "Who was [Napoleon|Caesar|Mozart|Einstein|Newton|Cleopatra]?",
    "How many people live in [London|China|America|Paris|Rome]?",
    "What is the [population|flag|history] of [Germany|Australia|Chile|Iceland]?",
    "When did [the war|the Roman empire|the last ice age] end?",
    "Which [film|song|book|phone|car] is the best?",
    "What did I [eat yesterday|do last summer|dream of]?",
    "What will happen [tomorrow|next year|in ten years]?",
)


def unknown(rng: random.Random) -> Asked:
    if rng.random() < 0.4:
        name = rng.choice(stories.GIRLS + stories.BOYS + ["Zelda", "Hubert", "Agatha", "Boris", "Wilma", "Kasimir", "Yvonne", "Otto"])
        form = rng.choice(
            (
                "Where does {n} live?",
                "How old is {n}?",
                "What is {n}'s job?",
                "Who is {n}?",
                "What pet does {n} have?",
                "What is {n}'s favourite food?",
                "What is {n}'s favourite colour?",
                "Tell me about {n}.",
            )
        )
        return Asked(
            form.replace("{n}", name),
            "I do not know",
            f"I do not know anybody called {name} in Willowmere." if rng.random() < 0.7 else f"I do not know {name}.",
        )
    return Asked(fill(rng, rng.choice(OUTSIDE)), "I do not know", rng.choice(DO_NOT_KNOW))


# ---- arithmetic ----

NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
THINGS = [
    "apples",
    "pears",
    "nuts",
    "stones",
    "cakes",
    "eggs",
    "flowers",
    "books",
    "buttons",
    "coins",
    "candles",
    "fish",
    "berries",
    "balls",
    "carrots",
]


def numbers(rng: random.Random, split: str, op: str | None = None) -> tuple[int, str, int, int]:
    """a op b = c, within 100 (products: within the small table), held out or not as the split wants."""
    while True:
        o = op or rng.choices("+-x", (4, 4, 3))[0]
        if o == "x":
            a, b = rng.randint(0, 10), rng.randint(0, 10)
            c = a * b
        else:
            top = 20 if rng.random() < 0.35 else 100
            c = rng.randint(0, top)
            a = rng.randint(0, c)
            b = c - a
            if o == "-":
                a, c = c, a
        if held_out(f"{a}{o}{b}") == (split != "train"):
            return a, o, b, c


SIGN = {"+": ("+", "plus"), "-": ("-", "minus"), "x": ("x", "times")}


def sum_question(rng: random.Random, split: str) -> Asked:
    a, o, b, c = numbers(rng, split)
    sign, word = SIGN[o]
    form = rng.choice(
        (
            "What is {a} {s} {b}?",
            "{a} {s} {b} = ?",
            "How much is {a} {s} {b}?",
            "What is {a} {w} {b}?",
            "How much is {a} {w} {b}?",
            "Calculate {a} {s} {b}.",
            "Compute {a} {s} {b}.",
            "What does {a} {s} {b} make?",
        )
    )
    words = {"a": str(a), "b": str(b), "s": sign, "w": word}
    full = (
        rng.choice((f"{a} {sign} {b} = {c}", f"{a} {sign} {b} = {c}.", f"{a} {word} {b} is {c}."))
        if "{w}" in form
        else rng.choice((f"{a} {sign} {b} = {c}", f"{a} {sign} {b} = {c}."))
    )
    return Asked(fill(rng, form, words), str(c), full, f"{a}{o}{b}")


def word_problem(rng: random.Random, split: str) -> Asked:
    a, o, b, c = numbers(rng, split)
    while min(a, b) < 2:
        a, o, b, c = numbers(rng, split)
    she = rng.random() < 0.5
    name, other = rng.sample(stories.GIRLS if she else stories.BOYS, 2)
    w = {"n": name, "m": other, "a": str(a), "b": str(b), "t": rng.choice(THINGS), "he": "she" if she else "he"}
    if o == "+":
        form = rng.choice(
            (
                "{n} has {a} {t}. {m} gives {n} {b} more {t}. How many {t} does {n} have now?",
                "There are {a} {t} in one basket and {b} {t} in another. How many {t} are there in all?",
                "{n} finds {a} {t} in the morning and {b} {t} in the evening. How many {t} does {he} find?",
                "{n} has {a} {t} and {m} has {b} {t}. How many {t} do they have together?",
            )
        )
        sign = "+"
    elif o == "-":
        form = rng.choice(
            (
                "{n} has {a} {t}. {he} gives {b} {t} to {m}. How many {t} are left?",
                "There are {a} {t} on the table. {n} takes {b} of them. How many {t} are still there?",
                "{n} had {a} {t} and lost {b} of them. How many {t} does {he} have now?",
                "{n} has {a} {t}. {m} has {b} fewer. How many {t} does {m} have?",
            )
        )
        sign = "-"
    else:
        form = rng.choice(
            (
                "There are {a} boxes with {b} {t} each. How many {t} are there?",
                "{n} buys {a} bags. In every bag there are {b} {t}. How many {t} does {he} have?",
                "{a} children have {b} {t} each. How many {t} do they have in all?",
            )
        )
        sign = "x"
    unit = w["t"] if c != 1 else {"berries": "berry", "fish": "fish", "apples": "apple"}.get(w["t"], w["t"][:-1])
    return Asked(
        tidy(fill(rng, form, w)),
        str(c),
        rng.choice((f"{a} {sign} {b} = {c}. The answer is {c}.", f"{a} {sign} {b} = {c}, so it is {c} {unit}.")),
        f"{a}{o}{b}",
    )


def compare(rng: random.Random, split: str) -> Asked:
    a, b = rng.sample(range(101), 2)
    big = rng.random() < 0.5
    return Asked(
        f"Which is {'bigger' if big else 'smaller'}, {a} or {b}?",
        str(max(a, b) if big else min(a, b)),
        f"{max(a, b) if big else min(a, b)} is {'bigger' if big else 'smaller'} than {min(a, b) if big else max(a, b)}.",
    )


def sequence(rng: random.Random, split: str) -> Asked:
    step, start = rng.choice((1, 1, 2, 2, 3, 5, 10)), rng.randint(0, 40)
    if step in (5, 10):
        start = step * rng.randint(0, 4)
    row = [start + step * i for i in range(5)]
    kind = rng.random()
    if kind < 0.4:
        return Asked(f"What comes next: {', '.join(map(str, row[:4]))}?", str(row[4]), f"The next number is {row[4]}.")
    if kind < 0.7:
        n = rng.randint(0, 99)
        after = rng.random() < 0.5 or n == 0
        return Asked(
            f"Which number comes {'after' if after else 'before'} {n}?",
            str(n + 1 if after else n - 1),
            f"{n + 1 if after else n - 1} comes {'after' if after else 'before'} {n}.",
        )
    first = rng.randint(0, 12)
    last = first + rng.randint(2, 10)
    return Asked(
        f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))), ", ".join(map(str, range(first, last + 1))) + "."
    )


def doubles(rng: random.Random, split: str) -> Asked:
    n = rng.randint(1, 50)
    if rng.random() < 0.5:
        return Asked(f"What is twice {n}?", str(2 * n), f"Twice {n} is {2 * n}.")
    if rng.random() < 0.5:
        return Asked(f"What is half of {2 * n}?", str(n), f"Half of {2 * n} is {n}.")
    return Asked(f"Is {n} even or odd?", "odd" if n % 2 else "even", f"{n} is {'odd' if n % 2 else 'even'}.")


MATHS: tuple[tuple[Callable[[random.Random, str], Asked], int], ...] = (
    (sum_question, 10),
    (word_problem, 5),
    (compare, 2),
    (sequence, 3),
    (doubles, 2),
)
KNOWLEDGE: tuple[tuple[Callable[[random.Random], Asked], int], ...] = (
    (about_people, 14),
    (about_places, 5),
    (yes_or_no, 3),
    (older, 2),
    (about_facts, 3),
    (about_anything, 5),
    (unknown, 2),
)


def maths(rng: random.Random, split: str) -> Asked:
    return rng.choices([m for m, _ in MATHS], [n for _, n in MATHS])[0](rng, split)


def knowledge(rng: random.Random, split: str) -> Asked:
    """A question about the world; in the held-out split only those that training never asks (or that are never held out)."""
    while True:
        asked = rng.choices([m for m, _ in KNOWLEDGE], [n for _, n in KNOWLEDGE])[0](rng)
        if not asked.key or held_out(asked.key) == (split != "train"):
            return asked


# ---- documents: story, world, arithmetic ----


def story(rng: random.Random, split: str) -> Document:
    told, _ = stories.tell(rng)
    text = told.text()
    r = rng.random()
    if r < 0.12:
        text = f"{told.title}\n\n{text}"
    elif r < 0.2:
        text = f"{text}\n\nSummary: {told.summary}"
    elif r < 0.26:
        text = f"{text}\n\n" + "\n".join(f"Question: {q}\nAnswer: {a}" for q, a in _story_questions(told))
    return Document("story", text)


def _story_questions(told: stories.Story) -> list[tuple[str, str]]:
    w = told.words
    return [
        ("What is the story about?", told.summary),
        ("Who is the story about?", f"It is about {w['h']}, {stories.tidy('a ' + w['hd'])}."),
        (
            "What kind of person is " + w["h"] + "?"
            if told.kind in ("girl", "boy")
            else f"What kind of animal is {w['h']}?"
            if told.kind != "robot"
            else f"What is {w['h']}?",
            f"{w['h']} is {an(told.kind)}.",
        ),
        (f"Who is {w['f']}?", f"{w['f']} is {an(w['fk'])}."),
    ]


def person_prose(rng: random.Random, p: Person) -> str:
    w = _person_words(p)
    parts = [
        "{n} is [{a_job} in Willowmere|the {job} of Willowmere]." if p.job != "pupil" else "{n} is a pupil at the school of Willowmere.",
        "{He} is {age} years old[ and lives {home}|. {He} lives {home}].",
        "{He} {work}.",
        "{He} has {a_pet} [called|named] {petname}.",
        "{His} favourite food is {food}[, and {his} favourite colour is {colour}|. {His} favourite colour is {colour}].",
        "{He} likes {hobby}.",
    ]
    parts += [f"{{He}} is the {r} of {b}." for a, r, b in RELATIVES if a == p.name]
    head, tail = parts[0], parts[1:]
    rng.shuffle(tail)
    return fill(rng, " ".join([head] + tail[: rng.randint(3, len(tail))]), w)


def place_prose(rng: random.Random, p: Place) -> str:
    parts = [
        "{P} is {where}[, next to {near}|. It is next to {near}].",
        "[You can see {has} there|At {p} you can see {has}].",
        "People go to {p} to {use}.",
    ]
    rng.shuffle(parts)
    return fill(rng, " ".join(parts), _place_words(p))


def day_in_willowmere(rng: random.Random) -> str:
    """A walk through the village: who is met where, with the facts of the tables and weather of its own."""
    who = rng.choice(PEOPLE)
    met = rng.sample([p for p in PEOPLE if p is not who], rng.randint(2, 4))
    w = _person_words(who)
    out = [
        fill(
            rng,
            "[It was a {x} morning in Willowmere|One {x} day in Willowmere|On a {x} morning in the Alder Valley], [|and ]{n} the {job} "
            "[went for a walk|was on the way to {p}|had much to do]{y}.".replace("|and ]", "|]"),
            w
            | {
                "x": rng.choice(("sunny", "cold", "windy", "bright", "rainy", "foggy", "spring", "winter")),
                "p": rng.choice(PLACES).name,
                "y": rng.choice(("", f" with {who.pet_name} the {who.pet}")),
            },
        )
    ]
    if out[0].startswith("It was"):
        out = [out[0].replace(", ", ". ", 1)]
    for p in met:
        m = _person_words(p) | {"who": who.name, "whohe": w["he"], "place": rng.choice(PLACES).name}
        out.append(
            fill(
                rng,
                "[At {place} {whohe} met {n}|Near {place} {whohe} saw {n}|Then {n} came along], [who {work}|the {job}|who lives {home}|"
                "who is {age} years old].",
                m,
            )
        )
        out.append(
            fill(
                rng,
                "[{n} was [happy|tired|in a good mood] and [talked about {his} {pet} {petname}|was eating {food}|spoke of {hobby}].|"
                '{petname} the {pet} was there too.|"Have you seen {petname}, my {pet}?" asked {n}.|'
                '"I would like some {food} now," said {n}, because that is {his} favourite food.|{n} wore [a {colour} scarf|'
                "a {colour} hat|{colour} boots], because {colour} is {his} favourite colour.|"
                '"Nothing is better than {hobby}," said {n}.|They talked for a while about the weather.]',
                m,
            )
        )
    out.append(
        fill(
            rng,
            "[In the evening {n} went home and ate {food}.|At noon the copper bell rang, and {n} went home.|Then {n} went home, for "
            "{he} lives {home}.|At night the lamp of the lighthouse shone over Mirror Lake.|"
            "{n} was glad to live in Willowmere.]",
            w,
        )
    )
    return tidy(" ".join(out))


def plain_questions(rng: random.Random, asked: list[Asked]) -> str:
    q, a = rng.choice((("Question:", "Answer:"), ("Question:", "Answer:"), ("Q:", "A:")))
    short = rng.random() < 0.4
    return rng.choice(("\n", "\n\n")).join(f"{q} {x.question}\n{a} {cap(x.short) if short else x.full}" for x in asked)


def world(rng: random.Random, split: str) -> Document:
    r = rng.random()
    if r < 0.22:
        people = rng.sample(PEOPLE, rng.randint(1, 3))
        text = "\n\n".join(person_prose(rng, p) for p in people)
        if rng.random() < 0.2:
            text = f"About {people[0].name}\n\n{person_prose(rng, people[0])}"
    elif r < 0.3:
        text = "\n\n".join(place_prose(rng, p) for p in rng.sample(PLACES, rng.randint(1, 3)))
    elif r < 0.37:
        text = " ".join(x[2] for x in rng.sample(FACTS, rng.randint(3, 7)))
        text = f"{VILLAGE} is a small village in the Alder Valley. {text}"
    elif r < 0.58:
        text = day_in_willowmere(rng)
    else:
        text = plain_questions(rng, [knowledge(rng, split) for _ in range(rng.randint(1, 7))])
    return Document("world", text)


def arithmetic(rng: random.Random, split: str) -> Document:
    r = rng.random()
    if r < 0.45:
        rows = [numbers(rng, split) for _ in range(rng.randint(4, 16))]
        return Document("arithmetic", "\n".join(f"{a} {SIGN[o][0]} {b} = {c}" for a, o, b, c in rows))
    asked = [maths(rng, split) for _ in range(rng.randint(1, 6))]
    if r < 0.75:
        return Document("arithmetic", plain_questions(rng, asked))
    return Document("arithmetic", turns=tuple(t for x in asked[:3] for t in (("user", careless(rng, x.question)), ("assistant", x.full))))


# ---- documents: chat ----


def careless(rng: random.Random, text: str) -> str:
    """Now and then, the way people type: lower case, no mark at the end, a doubled or swapped letter."""
    r = rng.random()
    if r < 0.12:
        text = text.lower()
    elif r < 0.18:
        text = low(text)
    if rng.random() < 0.12:
        text = text.rstrip("?.! ")
    if rng.random() < 0.05 and len(text) > 8 and not any(c.isdigit() for c in text):
        i = rng.randrange(1, len(text) - 2)
        if text[i].isalpha() and text[i + 1].isalpha() and text[i].islower():
            text = rng.choice((text[:i] + text[i + 1] + text[i] + text[i + 2 :], text[:i] + text[i] + text[i:], text[:i] + text[i + 1 :]))
    return text


def politely(rng: random.Random, question: str) -> str:
    if question.endswith("?") and rng.random() < 0.25:
        return (
            rng.choice(
                (
                    "Please tell me: ",
                    "I have a question. ",
                    "Hello! ",
                    "Can you help me? ",
                    "Hi, ",
                    "I want to know: ",
                    "Do you know this? ",
                )
            )
            + question
        )
    return question


SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are tinyvllm's demonstration model.",
    "You are a kind helper who knows the village of Willowmere.",
    "You are a storyteller.",
    "Be polite and helpful.",
)
BRIEF = (
    "Answer in one or two words.",
    "Answer briefly.",
    "Give short answers.",
    "You are a helpful assistant. Answer in as few words as possible.",
)
HELLO = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi!", "Hi! What can I do for you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Good evening.", "Good evening! What would you like to know?"),
    ("Hey there", "Hey! How can I help?"),
    ("Hi, how are you?", "I am well, thank you. How are you?"),
    ("How are you?", "I am well, thank you. What can I do for you?"),
    ("Hello, is anybody there?", "Yes, I am here. How can I help you?"),
)
WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Are you a person?",
    "Tell me about yourself.",
    "Are you a robot?",
    "Who made you?",
    "What can you do?",
    "How big are you?",
    "Are you human?",
)
I_AM = {
    "who": (
        "I am tinyvllm's demonstration model, a very small language model.",
        "I am the demonstration model of tinyvllm. I am a very small language model, but I do my best.",
        "I am a very small language model. I come with tinyvllm, and I can tell stories and answer simple questions.",
    ),
    "name": ("I have no real name. I am the demonstration model of tinyvllm.", "You can call me tinyvllm's demonstration model."),
    "person": ("No, I am not a person. I am a very small language model.", "No, I am only a small language model."),
    "made": (
        "I was trained with a small script that comes with tinyvllm.",
        "The makers of tinyvllm trained me on stories and questions that a program wrote.",
    ),
    "can": (
        "I can tell short stories, answer questions about the village of Willowmere, do simple sums, make lists and write small JSON "
        "records.",
        "I can tell you a story, talk about Willowmere, add and subtract small numbers and write JSON.",
    ),
    "big": (
        "I am very small. I have less than seven million parameters.",
        "I have about seven million parameters. That is very small for a language model.",
    ),
}
WHO_KEY = {
    "Who are you?": "who",
    "What are you?": "who",
    "Tell me about yourself.": "who",
    "What is your name?": "name",
    "Are you a person?": "person",
    "Are you a robot?": "person",
    "Are you human?": "person",
    "Who made you?": "made",
    "What can you do?": "can",
    "How big are you?": "big",
}
THANKS = (
    ("Thank you!", "You are welcome!"),
    ("Thanks.", "You are welcome! Is there anything else?"),
    ("Thank you very much!", "You are very welcome!"),
    ("Great, thanks!", "I am glad I could help."),
    ("That is all, thank you.", "You are welcome. Goodbye!"),
    ("Goodbye!", "Goodbye! Have a nice day."),
    ("Bye", "Bye! Come back soon."),
    ("Good night.", "Good night! Sleep well."),
    ("Well done!", "Thank you!"),
    ("Nice!", "I am glad that you like it."),
)
LISTS: dict[str, tuple[str, ...]] = {
    "animals": tuple(a for a in stories.ANIMALS if a not in ("robot", "dragon")),
    "colours": ("red", "blue", "green", "yellow", "purple", "orange", "white", "black", "brown", "pink", "grey"),
    "fruits": ("apple", "pear", "plum", "cherry", "banana", "orange", "lemon", "grape", "peach", "strawberry"),
    "vegetables": ("carrot", "potato", "onion", "cabbage", "bean", "pea", "tomato", "cucumber", "pumpkin"),
    "trees": ("oak", "pine", "birch", "willow", "beech", "maple", "ash", "chestnut"),
    "birds": ("owl", "crow", "duck", "goose", "sparrow", "swan", "eagle", "robin"),
    "people of Willowmere": tuple(p.name for p in PEOPLE),
    "places in Willowmere": tuple(p.name for p in PLACES),
    "tools": ("hammer", "saw", "nail", "rope", "spade", "needle", "brush", "ladder"),
    "things to eat": ("bread", "cheese", "soup", "cake", "rice", "honey", "eggs", "porridge"),
    "jobs": tuple(p.job for p in PEOPLE if p.job != "pupil"),
    "toys": ("ball", "doll", "kite", "drum", "puzzle", "top", "wooden train", "teddy bear"),
    "flowers": ("rose", "tulip", "daisy", "violet", "sunflower", "poppy", "lily"),
}
HOW_TO = {
    "make tea": (
        "Boil some water.",
        "Put the tea into a pot.",
        "Pour the hot water over it.",
        "Wait for five minutes.",
        "Pour the tea into a cup.",
    ),
    "bake bread": (
        "Mix flour, water, salt and yeast.",
        "Knead the dough well.",
        "Let the dough rest for an hour.",
        "Bake it in a hot oven.",
        "Let the bread cool down.",
    ),
    "plant a seed": (
        "Make a small hole in the earth.",
        "Put the seed into the hole.",
        "Cover it with earth.",
        "Give it water every day.",
        "Be patient and wait.",
    ),
    "make a sandwich": (
        "Take two slices of bread.",
        "Put butter on the bread.",
        "Add cheese and tomato.",
        "Put the slices together.",
        "Cut it in two.",
    ),
    "build a snowman": (
        "Roll a big ball of snow.",
        "Roll a smaller ball and put it on top.",
        "Make a third ball for the head.",
        "Use a carrot for the nose.",
        "Give it a hat.",
    ),
    "cook soup": (
        "Cut the vegetables.",
        "Put them into a pot of water.",
        "Add a little salt.",
        "Let the soup cook for half an hour.",
        "Serve it hot.",
    ),
    "fly a kite": (
        "Go to an open field on a windy day.",
        "Hold the kite up into the wind.",
        "Run and let out the string.",
        "Pull gently to keep it in the air.",
    ),
    "wash a dog": (
        "Fill a tub with warm water.",
        "Put the dog into the tub.",
        "Rub it with soap.",
        "Rinse it well.",
        "Dry it with a towel.",
    ),
}
SENTENCES = (
    "the cat sleeps on the warm roof",
    "we go to the market on Saturday",
    "the moon is bright tonight",
    "my red ball is in the garden",
    "a small boat sails on the lake",
    "the old clock is slow",
    "I like bread with honey",
    "seven birds sit on the wall",
    "the wind sings in the trees",
    "snow falls on the quiet hills",
)
Turns = list[tuple[str, str]]


def listing(rng: random.Random, items: list[str]) -> str:
    if rng.random() < 0.75:
        return "\n".join(f"{i}. {cap(x)}" for i, x in enumerate(items, 1))
    return "\n".join(f"- {cap(x)}" for x in items)


def chat_hello(rng: random.Random, split: str) -> Turns:
    q, a = rng.choice(HELLO)
    return [("user", careless(rng, q)), ("assistant", a)]


def chat_who(rng: random.Random, split: str) -> Turns:
    q = rng.choice(WHO)
    return [("user", careless(rng, politely(rng, q))), ("assistant", rng.choice(I_AM[WHO_KEY[q]]))]


def chat_question(rng: random.Random, split: str) -> Turns:
    x = knowledge(rng, split) if rng.random() < 0.8 else maths(rng, split)
    return [("user", careless(rng, politely(rng, x.question))), ("assistant", x.full)]


def chat_questions(rng: random.Random, split: str) -> Turns:
    return [t for _ in range(rng.randint(2, 4)) for t in chat_question(rng, split)]


def chat_pronoun(rng: random.Random, split: str) -> Turns:
    """A follow-up question that says "she" or "he" for the person of the question before."""
    p = rng.choice(PEOPLE)
    w = _person_words(p)
    first, second = rng.sample(
        [
            ("job", "What does {n} do?", "What does {he} do?"),
            ("age", "How old is {n}?", "And how old is {he}?"),
            ("home", "Where does {n} live?", "Where does {he} live?"),
            ("food", "What is {n}'s favourite food?", "And what is {his} favourite food?"),
            ("colour", "What is {n}'s favourite colour?", "What is {his} favourite colour?"),
            ("pet", "What pet does {n} have?", "Does {he} have a pet?"),
            ("hobby", "What is {n}'s hobby?", "What does {he} like to do?"),
        ],
        2,
    )
    out = []
    for (relation, named, pronoun), is_first in ((first, True), (second, False)):
        form = named if is_first else pronoun
        answer = fill(rng, PERSON[relation][2][0], w)
        if not is_first and rng.random() < 0.5:
            answer = answer.replace(p.name + "'s", w["His"], 1).replace(p.name, w["He"], 1)
        out += [
            ("user", careless(rng, fill(rng, form, w))),
            (
                "assistant",
                ("Yes, " + low(answer) if not answer.startswith(p.name) else "Yes, " + answer) if form.startswith("Does") else answer,
            ),
        ]
    return out


def chat_story(rng: random.Random, split: str) -> Turns:
    r = rng.random()
    kind = name = shape = None
    if r < 0.15:
        ask = rng.choice(
            (
                "Tell me a story.",
                "Please tell me a story.",
                "Can you tell me a story?",
                "I would like to hear a story.",
                "Write a short story.",
                "Tell me a bedtime story.",
            )
        )
    elif r < 0.6:
        kind = rng.choice(stories.ANIMALS + ["girl", "boy"])
        ask = fill(
            rng,
            "[Tell me a story about {k}.|Please tell me a story about {k}.|Write a [short |]story about {k}.|Can you tell me a story "
            "about {k}?|I want a story about {k}.|A story about {k}, please.]",
            {"k": an(kind)},
        )
    elif r < 0.8:
        kind = rng.choice(stories.ANIMALS + ["girl", "boy"] * 6)
        pool = stories.GIRLS if kind == "girl" else stories.BOYS if kind == "boy" else stories.FEMALE_NAMES + stories.MALE_NAMES
        name = rng.choice(pool)
        ask = fill(
            rng,
            "[Tell me a story about {k} called {n}.|Write a story about {k} named {n}.|Can you tell me a story about {n} the {k0}?]",
            {"k": an(kind), "k0": kind, "n": name},
        )
    else:
        shape = rng.choice(stories.SUBJECTS)
        ask = f"{rng.choice(('Tell me a story about', 'Write a story about', 'I would like a story about'))} {stories.THEMES[shape]}."
    told, _ = stories.tell(rng, shape, kind, name)
    turns = [("user", careless(rng, ask)), ("assistant", told.text())]
    if rng.random() < 0.35:
        w = told.words
        more = rng.choice(
            (
                ("What is the story about?", told.summary),
                ("Can you sum it up in one sentence?", told.summary),
                ("What is the title of the story?", f'The title is "{told.title}".'),
                ("Give it a title, please.", told.title),
                ("Who is the hero of the story?", f"The hero of the story is {w['h']}, {tidy('a ' + w['hd'])}."),
                ("That was nice!", "I am glad that you liked it."),
                ("Thank you, I liked it.", "You are welcome! Would you like another one?"),
            )
        )
        turns += [("user", careless(rng, more[0])), ("assistant", more[1])]
    return turns


def chat_summary(rng: random.Random, split: str) -> Turns:
    told, _ = stories.tell(rng)
    ask = rng.choice(
        ("Summarise this story in one sentence:", "Sum up this story:", "What is this story about?", "Please give me a short summary.")
    )
    return [("user", f"{ask}\n\n{told.text()}"), ("assistant", told.summary)]


def chat_memory(rng: random.Random, split: str) -> Turns:
    name = rng.choice(stories.GIRLS + stories.BOYS + [p.name for p in PEOPLE])
    thing = rng.choice(
        (
            ("colour", rng.choice(stories.COLOURS[:8])),
            ("animal", rng.choice(stories.ANIMALS)),
            ("food", rng.choice(("soup", "bread", "cake", "cheese", "apples", "rice", "pancakes"))),
            ("day", rng.choice(DAYS)),
        )
    )
    turns = [
        ("user", fill(rng, "[Hello, my|Hi! My|My] name is {n}.[ How are you?||]", {"n": name})),
        ("assistant", fill(rng, "[Hello, {n}! How can I help you?|Nice to meet you, {n}!|Hi {n}! What can I do for you?]", {"n": name})),
    ]
    if rng.random() < 0.5:
        turns += [
            ("user", f"My favourite {thing[0]} is {thing[1]}."),
            (
                "assistant",
                rng.choice(
                    (
                        f"That is nice. I will remember that your favourite {thing[0]} is {thing[1]}.",
                        "That is good to know!",
                        f"{cap(thing[1])} is a good choice.",
                    )
                ),
            ),
        ]
        asked_thing = True
    else:
        asked_thing = False
    if rng.random() < 0.6:
        turns += chat_question(rng, split)
    turns += [
        ("user", careless(rng, rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")))),
        ("assistant", rng.choice((f"Your name is {name}.", f"You are {name}."))),
    ]
    if asked_thing and rng.random() < 0.7:
        turns += [("user", f"What is my favourite {thing[0]}?"), ("assistant", f"Your favourite {thing[0]} is {thing[1]}.")]
    return turns


def chat_list(rng: random.Random, split: str) -> Turns:
    r = rng.random()
    if r < 0.7:
        what = rng.choice(tuple(LISTS))
        n = rng.randint(2, 6)
        ask = fill(
            rng, "[Name|List|Give me|Write down|Can you name] {n} {w}", {"n": NUMBER_WORDS[n] if rng.random() < 0.7 else str(n), "w": what}
        )
        items = rng.sample(LISTS[what], n)
        return [("user", careless(rng, ask + ("?" if ask.startswith("Can") else "."))), ("assistant", listing(rng, items))]
    if r < 0.85:
        what, names = rng.choice(
            (
                ("days of the week", DAYS),
                ("months of the year", MONTHS),
                ("seasons", SEASONS),
                ("children of Willowmere", ("Tobin", "Ilka", "Niko")),
            )
        )
        return [
            ("user", careless(rng, rng.choice((f"List the {what}.", f"Name the {what}.", f"What are the {what}?")))),
            ("assistant", listing(rng, list(names)) if rng.random() < 0.7 else f"The {what} are {', '.join(names[:-1])} and {names[-1]}."),
        ]
    what = rng.choice(tuple(HOW_TO))
    return [
        (
            "user",
            careless(
                rng, rng.choice((f"How do I {what}?", f"How can I {what}?", f"Tell me how to {what}.", f"Give me the steps to {what}."))
            ),
        ),
        ("assistant", "\n".join(f"{i}. {x}" for i, x in enumerate(HOW_TO[what], 1))),
    ]


def chat_words(rng: random.Random, split: str) -> Turns:
    word = rng.choice(stories.OBJECTS + LISTS["animals"] + LISTS["fruits"] + LISTS["colours"])
    r = rng.random()
    if r < 0.35:
        line = rng.choice(SENTENCES) if rng.random() < 0.6 else " ".join(rng.sample(LISTS["animals"] + LISTS["fruits"], 4))
        return [("user", f"{rng.choice(('Repeat after me', 'Repeat', 'Say this', 'Please repeat'))}: {line}"), ("assistant", line)]
    if r < 0.55:
        return [
            ("user", f"{rng.choice(('Spell the word', 'How do you spell', 'Spell'))} {word}."),
            ("assistant", "-".join(word.replace(" ", ""))),
        ]
    if r < 0.75:
        first, second = rng.sample(LISTS["animals"] + LISTS["fruits"] + LISTS["tools"], 2)
        return [
            ("user", f"Write a sentence with the word {first}."),
            (
                "assistant",
                tidy(
                    rng.choice(
                        (
                            f"The {first} is in the garden.",
                            f"I saw a {first} near the {second}.",
                            f"My {first} is next to the {second}.",
                            f"A {first} lay on the table.",
                            f"There is a {first} behind the house.",
                        )
                    )
                ),
            ),
        ]
    group = rng.choice(tuple(k for k in LISTS if k in ("animals", "fruits", "colours", "tools", "trees", "vegetables")))
    word = rng.choice(LISTS[group])
    other = rng.choice([k for k in ("animals", "fruits", "colours", "tools") if k != group])
    if rng.random() < 0.5 or word in LISTS[other]:
        return [
            ("user", f"Is {an(word) if group != 'colours' else word} {an(group[:-1])}?"),
            ("assistant", f"Yes, {an(word) if group != 'colours' else word} is {an(group[:-1])}."),
        ]
    return [
        ("user", f"Is {an(word) if group != 'colours' else word} {an(other[:-1])}?"),
        ("assistant", f"No, {an(word) if group != 'colours' else word} is {an(group[:-1])}."),
    ]


def chat_feeling(rng: random.Random, split: str) -> Turns:
    q, a = rng.choice(
        (
            ("I am sad.", "I am sorry to hear that. Would you like to hear a story?"),
            ("I am happy today!", "That is wonderful! What made you happy?"),
            ("I am bored.", "Shall I tell you a story, or shall we do some sums?"),
            ("I am tired.", "Then you should rest a little. Good night!"),
            ("I am hungry.", "Then you should eat something. Mira the baker makes good bread!"),
            ("I cannot sleep.", "Shall I tell you a quiet story?"),
            ("It is raining.", "Then it is a good day for reading or for a story."),
            ("I like you.", "Thank you! That is kind of you."),
            ("You are funny.", "Thank you! I am glad that I make you laugh."),
            ("Tell me a joke.", "What does a cloud wear under its coat? Thunderwear!"),
            ("Tell me a joke, please.", "Why did the hen cross the road? To get to the other side."),
            ("Can you sing?", "No, I cannot sing, but I can tell you a story."),
            ("Do you sleep?", "No, I do not sleep. I am a language model."),
            ("Do you like animals?", "I like stories about animals. My favourite is the owl Tick, who lives with Edda."),
            ("Where do you live?", "I live inside a computer, but in my stories I live in Willowmere."),
            (
                "Sing me a song.",
                "I cannot sing, but here are some words: The moon is high, the night is deep, now close your eyes and go to sleep.",
            ),
            ("Can you help me?", "Yes, of course. What would you like to know?"),
            ("I do not understand.", "I am sorry. Please ask me again in other words."),
            ("You are wrong.", "I am sorry. I am a very small model, and I make mistakes."),
            ("Are you sure?", "Not always. I am a very small model, and I can make mistakes."),
        )
    )
    return [("user", careless(rng, q)), ("assistant", a)]


CHATS: tuple[tuple[Callable[[random.Random, str], Turns], int], ...] = (
    (chat_hello, 3),
    (chat_who, 5),
    (chat_question, 12),
    (chat_questions, 6),
    (chat_pronoun, 5),
    (chat_story, 18),
    (chat_summary, 4),
    (chat_memory, 8),
    (chat_list, 9),
    (chat_words, 5),
    (chat_feeling, 4),
)


def chat(rng: random.Random, split: str) -> Document:
    if rng.random() < 0.06:
        asked = [knowledge(rng, split) for _ in range(rng.randint(1, 3))]
        turns = [("system", rng.choice(BRIEF))] + [
            t for x in asked for t in (("user", careless(rng, x.question)), ("assistant", cap(x.short)))
        ]
        return Document("chat", turns=tuple(turns))
    parts = rng.choices([f for f, _ in CHATS], [n for _, n in CHATS], k=rng.choices((1, 2, 3), (6, 3, 1))[0])
    turns = [t for f in parts for t in f(rng, split)]
    if parts[0] is not chat_hello and rng.random() < 0.08:
        turns = chat_hello(rng, split) + turns
    if rng.random() < 0.15:
        q, a = rng.choice(THANKS)
        turns += [("user", careless(rng, q)), ("assistant", a)]
    if rng.random() < 0.2:
        turns = [("system", rng.choice(SYSTEMS))] + turns
    return Document("chat", turns=tuple(turns))


# ---- documents: JSON ----

TOWNS = [
    "Birkdale",
    "Ashford",
    "Linden",
    "Marrow",
    "Oakham",
    "Riverton",
    "Stonewell",
    "Harrow",
    "Elmside",
    "Foxley",
    "Brookfield",
    "Seaham",
]


def made_up(rng: random.Random) -> tuple[dict[str, object], str]:
    """A record of somebody made up, and the description that says the same."""
    she = rng.random() < 0.5
    he, his = ("She", "Her") if she else ("He", "His")
    name, age, town = rng.choice(stories.GIRLS if she else stories.BOYS), rng.randint(4, 90), rng.choice(TOWNS)
    record: dict[str, object] = {"name": name, "age": age}
    text = [f"{name} is {age} years old"]
    if rng.random() < 0.6:
        record["town"] = town
        text[0] += f" and lives in {town}"
    if rng.random() < 0.5:
        record["job"] = rng.choice(LISTS["jobs"])
        text.append(f"{he} is {an(str(record['job']))}")
    if rng.random() < 0.4:
        record["likes"] = rng.sample(LISTS["fruits"] + LISTS["colours"][:5], rng.randint(1, 3))
        likes = [str(x) for x in record["likes"]]  # type: ignore[attr-defined]
        text.append(f"{he} likes {joined(likes)}")
    if rng.random() < 0.35:
        kind, pet = rng.choice(LISTS["animals"]), rng.choice(stories.FEMALE_NAMES + stories.MALE_NAMES)
        record["pet"] = {"kind": kind, "name": pet}
        text.append(f"{he} has {an(kind)} called {pet}")
    if rng.random() < 0.2:
        record["married"] = rng.random() < 0.5
        text.append(f"{he} is {'' if record['married'] else 'not '}married")
    return record, ". ".join(text) + "."


def of_person(p: Person) -> dict[str, object]:
    return {"name": p.name, "age": p.age, "job": p.job, "pet": p.pet, "favourite_food": p.food, "favourite_colour": p.colour}


def shopping(rng: random.Random) -> dict[str, object]:
    items = [{"item": x, "count": rng.randint(1, 12)} for x in rng.sample(LISTS["fruits"] + LISTS["vegetables"], rng.randint(1, 4))]
    return {"list": "shopping", "items": items}


def small_record(rng: random.Random, split: str) -> dict[str, object]:
    r = rng.random()
    if r < 0.35:
        return {
            "animal": rng.choice(LISTS["animals"]),
            "colour": rng.choice(LISTS["colours"]),
            "weight": rng.randint(1, 90),
            "tame": rng.random() < 0.5,
        }
    if r < 0.6:
        return {
            "day": rng.choice(DAYS),
            "weather": rng.choice(("sunny", "rainy", "windy", "cloudy", "foggy")),
            "temperature": rng.randint(-5, 30),
        }
    if r < 0.8:
        p = rng.choice(PLACES)
        return {"place": p.name, "where": p.where, "next_to": p.near}
    a, o, b, c = numbers(rng, split)
    return {"a": a, "op": o, "b": b, "result": c}


def dump(rng: random.Random, record: object) -> str:
    return json.dumps(record, indent=2) if rng.random() < 0.15 else json.dumps(record)


def records(rng: random.Random, split: str) -> Document:
    r = rng.random()
    if r < 0.25:
        out = [
            made_up(rng)[0] if rng.random() < 0.5 else small_record(rng, split) if rng.random() < 0.6 else shopping(rng)
            for _ in range(rng.randint(1, 4))
        ]
        if rng.random() < 0.2:
            return Document("json", dump(rng, out))
        return Document("json", "\n".join(json.dumps(x) for x in out))
    if r < 0.55:
        p = rng.choice(PEOPLE)
        record = of_person(p)
        if rng.random() < 0.5:
            fields = rng.sample(tuple(record), rng.randint(1, 3))
            verb = rng.choice(("Write a JSON record for", "Give me a JSON object for", "Describe as JSON:"))
            ask = f"{verb} {p.name} with the field{'s' if len(fields) > 1 else ''} {joined(fields)}."
            record = {k: record[k] for k in fields}
        else:
            ask = fill(
                rng,
                "[Write a JSON record for {n}.|Give me a JSON record about {n}.|Describe {n} as JSON.|Can you write {n} as a JSON "
                "object?|JSON for {n}, please.|Write JSON about {n}.]",
                {"n": p.name},
            )
        answer = dump(rng, record)
    elif r < 0.88:
        made, text = made_up(rng)
        ask = (
            fill(rng, "[Turn this into JSON:|Write this as JSON:|Make a JSON record of this:|Convert to JSON:|Extract the facts as JSON:]")
            + " "
            + text
        )
        if rng.random() < 0.12:
            ask = f"{text} {rng.choice(('Write that as JSON.', 'Give me this as a JSON object.'))}"
        answer = dump(rng, made)
    elif r < 0.94:
        name, age = rng.choice(stories.GIRLS + stories.BOYS), rng.randint(3, 90)
        ask, answer = f'Write a JSON object with name "{name}" and age {age}.', dump(rng, {"name": name, "age": age})
    else:
        items = [{"item": x, "count": rng.randint(2, 12)} for x in rng.sample(LISTS["fruits"], rng.randint(1, 3))]
        plural = [f"{i['count']} {plural_of(str(i['item']))}" for i in items]
        ask, answer = f"Write a shopping list as JSON: {', '.join(plural)}.", dump(rng, {"list": "shopping", "items": items})
    if rng.random() < 0.2:
        return Document("json", f"{ask}\n{answer}")
    turns: Turns = [("user", ask), ("assistant", answer)]
    if rng.random() < 0.12:
        turns = [
            ("system", rng.choice(("Answer only with JSON.", "You write JSON.", "You are a helpful assistant. Reply in JSON.")))
        ] + turns
    return Document("json", turns=tuple(turns))


MAKERS: dict[str, Callable[[random.Random, str], Document]] = {
    "story": story,
    "world": world,
    "arithmetic": arithmetic,
    "chat": chat,
    "json": records,
}


def documents(seed: int, split: str = "train", kind: str | None = None) -> Iterator[Document]:
    """Documents without end. `split` is "train" or "held-out"; `kind` keeps to one kind."""
    if split not in ("train", "held-out"):
        raise ValueError(f"split is 'train' or 'held-out', not {split!r}")
    rng = random.Random(f"{split}/{seed}")
    kinds, shares = list(SHARES), list(SHARES.values())
    while True:
        yield MAKERS[kind or rng.choices(kinds, shares)[0]](rng, split)


def held_out_text(count: int = 220) -> str:
    """The first documents of the stream that the model card's figures are measured on, each with its special tokens as in training.

    The BOS of the first is left to the tokenizer. 220 documents of all kinds are about 20,000 tokens.
    """
    return BOS.join(document.render() for document in islice(documents(7, "held-out"), count))
