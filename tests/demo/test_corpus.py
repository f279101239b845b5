"""The corpus generator: the same seed gives the same text, all kinds are there, JSON is JSON, and no answer contradicts the tables."""

from __future__ import annotations

import json
import random
import re
from itertools import islice

import pytest

from tinyvllm.demo import corpus, stories
from tinyvllm.demo.world import FACTS, PEOPLE, PLACES, RELATIVES


def take(count: int, seed: int = 11, split: str = "train", kind: str | None = None) -> list[corpus.Document]:
    return list(islice(corpus.documents(seed, split, kind), count))


def test_same_seed_same_documents():
    assert take(300) == take(300)
    assert take(50) != take(50, seed=12)
    assert take(50) != take(50, split="held-out")


def test_every_kind_comes_up():
    assert {d.kind for d in take(400)} == set(corpus.KINDS)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'held-out', not 'test'"):
        next(corpus.documents(1, "test"))


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_no_template_is_left_open(kind):
    for document in take(300, kind=kind):
        for text in [document.text] if document.text else [content for _, content in document.turns]:
            assert text.strip()
            if kind != "json":
                assert not re.search(r"[{}\[\]|]|  ", text), text


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_chats_alternate(kind):
    for document in take(300, kind=kind):
        roles = [role for role, _ in document.turns if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert "system" not in [role for role, _ in document.turns][1:]


def test_render_marks_turns_and_end():
    chat = corpus.Document("chat", turns=(("user", "Hi"), ("assistant", "Hello!")))
    assert chat.render() == "<|user|>Hi<|end|><|assistant|>Hello!<|end|>"
    assert corpus.Document("story", "Once.").render() == "Once.<|end|>"


def test_json_answers_parse():
    for document in take(500, kind="json"):
        if document.turns:
            json.loads(document.turns[-1][1])
        elif document.text[0] == "[":
            json.loads(document.text)
        elif document.text[0] == "{":
            for line in document.text.split("\n"):
                json.loads(line)


def test_sums_are_right():
    for document in take(300, kind="arithmetic"):
        text = document.text + "\n".join(content for _, content in document.turns)
        for a, sign, b, c in re.findall(r"(?<!\d)(\d+) ([+x-]) (\d+) = (\d+)", text):
            a, b = int(a), int(b)
            assert int(c) == {"+": a + b, "-": a - b, "x": a * b}[sign]


@pytest.mark.parametrize("make", ("about_people", "about_places", "yes_or_no", "older", "about_facts", "about_anything"))
def test_answers_hold_the_short_answer(make):
    make = getattr(corpus, make)
    rng = random.Random(3)
    for asked in (make(rng) for _ in range(400)):
        text = " ".join(re.findall(r"[\w' ]+", asked.full)).lower()
        if "related" in asked.question or asked.question.startswith("Does"):
            continue
        assert asked.short.lower().removeprefix("to ") in text or asked.short.lower() in asked.full.lower(), asked


def test_answers_agree_with_the_tables():
    people = {p.name: p for p in PEOPLE}
    rng = random.Random(5)
    for asked in (corpus.about_people(rng) for _ in range(2000)):
        for name, age in re.findall(r"(\w+) is (\d+) years old", asked.full):
            assert name in ("He", "She") or people[name].age == int(age)
        for name, job in re.findall(r"(\w+) is an? ([a-z ]+?)(?: in|\.)", asked.full):
            assert name not in people or people[name].job == job
        for name, pet, called in re.findall(r"(\w+) has an? (\w+) called (\w+)", asked.full):
            assert name in ("He", "She") or (people[name].pet, people[name].pet_name) == (pet, called)


def test_no_held_out_question_is_in_training():
    def keys(split: str) -> set[str]:
        rng = random.Random(9)
        return {corpus.knowledge(rng, split).key for _ in range(3000)} - {""}

    train, held = keys("train"), keys("held-out")
    assert held and not train & held
    assert not any(corpus.held_out(key) for key in train)


def test_no_held_out_sum_is_in_training():
    rng = random.Random(9)
    for split in ("train", "held-out"):
        for _ in range(2000):
            a, op, b, _ = corpus.numbers(rng, split)
            assert corpus.held_out(f"{a}{op}{b}") == (split == "held-out")


def test_the_tables_agree_with_themselves():
    names = {p.name for p in PEOPLE}
    assert len(names) == len(PEOPLE) == 16
    assert not names & set(stories.GIRLS + stories.BOYS)
    for field in ("pet_name", "food", "colour", "hobby", "pet"):
        assert len({getattr(p, field) for p in PEOPLE}) == len(PEOPLE), field
    assert {name for a, _, b in RELATIVES for name in (a, b)} <= names
    assert len({p.name for p in PLACES}) == len(PLACES)
    facts = {question: short for question, short, _ in FACTS}
    assert facts["Who is the oldest person in Willowmere?"] == max(PEOPLE, key=lambda p: p.age).name
    assert facts["Who is the youngest person in Willowmere?"] == min(PEOPLE, key=lambda p: p.age).name


@pytest.mark.parametrize("shape", stories.SUBJECTS)
def test_a_story_keeps_its_hero(shape):
    for seed in range(20):
        told, _ = stories.tell(random.Random(seed), shape, "fox", "Rusty")
        text = told.text()
        assert "Rusty" in text and "fox" in text and "Rusty" in told.summary + told.words["f"] and told.title
        assert text[0].isupper() and text[-1] in '."!'
        assert not re.search(r"\ba [aeio](?!ne\b)", text), text
