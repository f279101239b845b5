"""The bundled models do what the README says of them: read well, know their world, share a tokenizer, stay small."""

import json
import random
from pathlib import Path

import pytest

import tinyvllm.demo
from tinyvllm import LLM, SamplingParams
from tinyvllm.demo import corpus
from tinyvllm.demo.world import PEOPLE

FOLDER = Path(tinyvllm.demo.__file__).parent
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)


@pytest.fixture(scope="module")
def llm():
    with LLM(max_num_seqs=8) as llm:
        yield llm


def test_small_enough():
    assert sum(path.stat().st_size for name in ("model", "draft") for path in (FOLDER / name).iterdir()) < 24_000_000


def test_draft_and_model_share_a_tokenizer():
    model, draft = ((FOLDER / name / "tokenizer.json").read_bytes() for name in ("model", "draft"))
    assert model == draft


def test_the_draft_runs():
    with LLM(FOLDER / "draft", max_num_seqs=1) as draft:
        assert len(draft.generate("Once upon a time", GREEDY)[0].outputs[0].text.split()) > 20


def test_once_upon_a_time_goes_on_as_a_story(llm):
    prompts = ["Once upon a time", "One day", "There was once a"]
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=160) for seed in range(3)]
    for output in llm.generate(prompts, params):
        words = output.outputs[0].text.split()
        assert len(words) > 60 and len(set(words)) > 35, output.outputs[0].text
        assert output.outputs[0].text.count(".") > 4, "sentences"


def answers(llm, questions):
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], GREEDY)
    return [output.outputs[0].text for output in outputs]


def test_questions_about_its_world_are_answered(llm):
    random_ = random.Random(3)
    asked = [corpus.about_people(random_) for _ in range(16)] + [corpus.Asked(*fact) for fact in corpus.FACTS[:8]]
    said = answers(llm, [a.question for a in asked])
    wrong = [(a.question, a.short, text) for a, text in zip(asked, said, strict=True) if a.short.lower() not in text.lower()]
    assert len(wrong) <= 4, wrong


def test_json_on_request_is_the_person_asked_for(llm):
    people = PEOPLE[:8]
    said = answers(llm, [f"Write a JSON record for {p.name}." for p in people])
    records = [json.loads(text) for text in said]
    assert [record["name"] for record in records] == [p.name for p in people]
