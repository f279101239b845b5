"""Adapters in an engine: the tokens of merged weights, several in one batch, prefixes kept apart, loading and unloading."""

from __future__ import annotations

import functools

import pytest

from tests.tiny.adapters import ATTENTION, MLP, merge, write_adapter
from tinyvllm import LLM, LoRARequest, SamplingParams
from tinyvllm.errors import ArgumentError, ModelError, TinyvllmError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"max_model_len": 128, "max_num_seqs": 8, "num_blocks": 64, "device": "CPU", "speculative_config": "off"}
PROMPTS = [{"prompt_token_ids": [256, *range(start, start + 37)]} for start in (65, 70, 97, 40)]
ALPHA = {"first": 8.0, "second": 12.0}  # over rank 4


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "first", tiny_model, alpha=ALPHA["first"], seed=1)
    write_adapter(folder / "second", tiny_model, modules=(*ATTENTION[:1], ATTENTION[2], MLP[2]), alpha=ALPHA["second"], seed=2)
    return folder


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model, enable_lora=True, max_loras=2, **SMALL) as made:
        yield made


def request(adapters, name):
    return LoRARequest(name, lora_path=str(adapters / name))


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def base_tokens(llm):
    return ids(llm.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("name", ["first", "second"])
def test_tokens_and_log_probabilities_are_those_of_merged_weights(name, llm, adapters, tiny_model, tmp_path):
    merged = merge(tiny_model, adapters / name, tmp_path / "merged", ALPHA[name] / 4)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    got = llm.generate(PROMPTS, params, lora_request=request(adapters, name))
    with LLM(merged, **SMALL) as other:
        wanted = other.generate(PROMPTS, params)
    assert ids(got) == ids(wanted) != base_tokens(llm)
    for one, two in zip(got, wanted, strict=True):
        assert _scores(one) == [pytest.approx(each, abs=2e-3) for each in _scores(two)]


def _scores(output):
    """The log-probabilities of each position of the prompt and of the answer, by token."""
    return [{token: p.logprob for token, p in each.items()} for each in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]


def test_several_adapters_in_a_batch_give_what_each_gives_alone(llm, adapters):
    lora = [request(adapters, "first"), None, request(adapters, "second"), request(adapters, "first")]
    alone = [ids(llm.generate(prompt, GREEDY, lora_request=one))[0] for prompt, one in zip(PROMPTS, lora, strict=True)]
    assert llm.engine.scheduler.prefix is not None
    for turn in range(2):  # the second has its prompts from the cache
        if turn == 0:
            llm.engine.scheduler.prefix.reset()
        assert ids(llm.generate(PROMPTS, GREEDY, lora_request=lora)) == alone


def test_rows_without_an_adapter_keep_their_bits_next_to_rows_with_one(llm, adapters):
    """Prompts, chunks and decodes: log-probabilities are compared bit by bit."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
    lora = [None, request(adapters, "first"), None, request(adapters, "second")]

    def logprobs(outputs):
        return [[{token: p.logprob for token, p in step.items()} for step in output.outputs[0].logprobs] for output in outputs]

    plain = logprobs(llm.generate(PROMPTS, params))
    llm.engine.scheduler.prefix.reset()
    mixed = logprobs(llm.generate(PROMPTS, params, lora_request=lora))
    assert [mixed[0], mixed[2]] == [plain[0], plain[2]]
    assert mixed[1] != plain[1] and mixed[3] != plain[3]


def test_steps_without_adapters_are_those_of_an_engine_without(llm):
    llm.generate(PROMPTS, GREEDY)
    shapes = [shape for shape, _, _ in llm.engine.runner._steps]
    assert any(not shape.adapters for shape in shapes)
    assert all("adapters" in plan.inputs.tensors if shape.adapters else "adapters" not in plan.inputs.tensors
               for (shape, _, _), plan in llm.engine.runner._steps.items())  # fmt: skip


def test_cached_prefixes_belong_to_an_adapter_by_its_content(llm, adapters):
    prompt = {"prompt_token_ids": [256, *range(100, 140)]}
    first = request(adapters, "first")

    def cached(lora):
        return llm.generate(prompt, GREEDY, lora_request=lora)[0].num_cached_tokens

    assert [cached(None), cached(first), cached(None), cached(first)] == [0, 0, 32, 32]
    llm.unload_lora("first")
    llm.load_lora("again", adapters / "first")
    assert cached(LoRARequest("again")) == 32, "the same content under another name"
    llm.unload_lora("again")


def test_adapters_come_and_go(llm, adapters, tiny_model, tmp_path):
    before = base_tokens(llm)
    for name in [*llm.engine.adapters.loaded]:
        llm.unload_lora(name)
    wanted = ids(llm.generate(PROMPTS, GREEDY, lora_request=request(adapters, "first")))
    third = LoRARequest("third", lora_path=str(write_adapter(tmp_path / "third", tiny_model, seed=3)))
    llm.generate(PROMPTS, GREEDY, lora_request=request(adapters, "second"))
    llm.generate(PROMPTS, GREEDY, lora_request=third)  # takes the place of the first
    assert [*llm.engine.adapters.loaded] == ["second", "third"]
    with pytest.raises(ArgumentError, match="max_loras=2 adapters are loaded"):
        llm.load_lora("fourth", adapters / "first")
    with pytest.raises(TinyvllmError, match="prompt 2 of the list .* max_loras=2"):
        llm.generate(PROMPTS[:3], GREEDY, lora_request=[third, request(adapters, "second"), request(adapters, "first")])
    llm.unload_lora("third")
    with pytest.raises(ArgumentError, match="no adapter 'third' is loaded"):
        llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("third"))
    assert ids(llm.generate(PROMPTS, GREEDY, lora_request=request(adapters, "first"))) == wanted, "where the third has been"
    with pytest.raises(ArgumentError, match="was loaded from"):
        llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("first", lora_path=third.lora_path))
    assert base_tokens(llm) == before


def test_a_request_that_runs_keeps_its_adapter(llm, adapters, tiny_model, tmp_path):
    """Unloaded in the middle of an answer, its place is taken only after the answer."""
    for name in [*llm.engine.adapters.loaded]:
        llm.unload_lora(name)
    (wanted,) = ids(llm.generate(PROMPTS[0], GREEDY, lora_request=request(adapters, "first")))
    llm.load_lora("second", adapters / "second")
    stream = llm.follow(PROMPTS[0], GREEDY, lora_request=LoRARequest("first"))
    next(stream)
    llm.unload_lora("first")
    with pytest.raises(Exception, match="requests still use"):
        llm.load_lora("third", write_adapter(tmp_path / "third", tiny_model, seed=3))
    assert [output.outputs[0].token_ids for output in stream][-1] == wanted
    llm.load_lora("third", tmp_path / "third")
    llm.unload_lora("third")


def test_an_engine_without_adapters_refuses_them(tiny_model, adapters):
    with LLM(tiny_model, **SMALL) as plain, pytest.raises(ArgumentError, match="enable_lora"):
        plain.generate(PROMPTS[0], GREEDY, lora_request=request(adapters, "first"))
    with pytest.raises(ArgumentError, match="max_lora_rank=32 has no use without enable_lora"):
        LLM(tiny_model, max_lora_rank=32)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"quantization": "q4_0"}, {"quantization": "q8_0", "kv_cache_dtype": "int8"}, {"dtype": "bfloat16"},
                                     {"num_scheduler_steps": 4}, {"speculative_config": "ngram"}])  # fmt: skip
def test_adapters_on_other_engines(options, tiny_model, adapters):
    """Packed weights and caches, several steps at a time, drafts: a batch gives what each gives alone, and plain rows what they gave."""
    lora = [None, request(adapters, "first"), request(adapters, "second"), None]
    with LLM(tiny_model, enable_lora=True, max_loras=2, **SMALL | options) as llm:
        plain = base_tokens(llm)
        alone = [ids(llm.generate(prompt, GREEDY, lora_request=one))[0] for prompt, one in zip(PROMPTS, lora, strict=True)]
        assert ids(llm.generate(PROMPTS, GREEDY, lora_request=lora)) == alone
        assert [alone[0], alone[3]] == [plain[0], plain[3]] and alone[1] != plain[1]


@functools.cache
def answers_of_ranks(tiny_model, adapters, quantization, tensor, stages):
    """Tokens and log-probabilities with all their bits, before and after other adapters are loaded; requests are greedy and drawn."""
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "quantization": quantization, "max_num_batched_tokens": 32}
    params = [SamplingParams(temperature=heat, seed=5, max_tokens=12, ignore_eos=True, logprobs=2) for heat in (0.0, 0.9, 0.0, 0.9)]
    found = []
    with LLM(tiny_model, enable_lora=True, max_loras=2, **SMALL | sizes) as llm:
        for names in (["first", None, "second", "first"], ["third", "second", None, "third"]):
            lora = [None if name is None else request(adapters, name) for name in names]
            found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(PROMPTS, params, lora_request=lora)])
        if stages > 1:
            runner, read = llm.engine.runner, llm.engine.adapters.read
            with pytest.raises(ModelError, match="second' have changed while they were loaded"):
                runner.place_adapter(1, read(str(adapters / "first")), str(adapters / "second"))
            assert len(ids(llm.generate(PROMPTS[:1], GREEDY))[0]) == 12, "the engine continues"
    return found


@pytest.mark.parametrize(
    ("quantization", "tensor", "stages"),
    [("q8_0", 2, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((None, 2, 1), ("q4_0", 4, 1), (None, 1, 2)))],
)
def test_ranks_have_the_bits_of_one_process(quantization, tensor, stages, tiny_model, adapters):
    """Each rank has a part of A or of B, and each stage the adapters of its layers."""
    if not (adapters / "third").exists():
        write_adapter(adapters / "third", tiny_model, rank=7, seed=3)
    expected = answers_of_ranks(tiny_model, adapters, quantization, 1, 1)
    assert expected[0][0] != expected[1][0] and expected[0][2] != expected[1][2]
    assert answers_of_ranks(tiny_model, adapters, quantization, tensor, stages) == expected


@pytest.mark.long
def test_an_adapter_is_loaded_while_steps_are_in_flight(tiny_model, adapters):
    """Ranks of the last stage answer, although rank 0 does not run the step that they are to run next."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(tiny_model, **SMALL) as llm:
        expected = ids(llm.generate(PROMPTS[:3], params))
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with LLM(tiny_model, enable_lora=True, max_loras=2, **SMALL | sizes) as llm:
        for number, prompt in enumerate(PROMPTS[:3]):
            llm.engine.add(f"{number}", prompt["prompt_token_ids"], params)
        finished = {}
        for turn in range(200):
            finished |= {one.request_id: one for one in llm.engine.step() if one.finished}
            if name := {5: "first", 9: "second"}.get(turn):
                assert llm.engine.loop.in_flight
                llm.engine.adapters.load(name, str(adapters / name))
    assert ids([finished[f"{number}"] for number in range(3)]) == expected


def test_a_recording_names_the_adapters_of_requests(tiny_model, adapters, tmp_path):
    from tinyvllm.engine.tools.recording import read_run
    from tinyvllm.engine.tools.replay import config_of, replay

    folder, path = write_adapter(tmp_path / "one", tiny_model, seed=1), str(tmp_path / "run.jsonl")
    with LLM(tiny_model, record=path, lora_modules={"one": str(folder)}, **SMALL) as llm:
        llm.generate(PROMPTS[:2], GREEDY, lora_request=[LoRARequest("one"), None])
    run = read_run(path)
    assert run.added[0]["options"]["adapter"]["name"] == "one" and "adapter" not in run.added[1]["options"]
    assert replay(run, config_of(run, {})).identical
    write_adapter(folder, tiny_model, seed=2)
    with pytest.raises(ArgumentError, match="has changed since the recording"):
        replay(run, config_of(run, {}))


@pytest.mark.long
def test_captured_steps_with_adapters_are_kept(tiny_model, adapters, tmp_path, monkeypatch):
    """A second start runs neither the model nor a compiler, and its kernels were tested."""
    from tests.engine.starts import use_own_steps
    from tinyvllm.bridge import capture_work

    use_own_steps(monkeypatch, tmp_path)
    monkeypatch.setenv("TINYVLLM_SELFTEST", "on")
    tokens, captures = [], []
    for _ in range(2):
        before = capture_work().count
        with LLM(tiny_model, lora_modules={"first": str(adapters / "first")}, **SMALL) as llm:
            tokens.append(ids(llm.generate(PROMPTS, GREEDY, lora_request=[LoRARequest("first"), None, None, LoRARequest("first")])))
            tested = llm.engine.runner.self_test
        captures.append(capture_work().count - before)
    assert tokens[0] == tokens[1] and captures[0] > 0 == captures[1]
    assert tested.tested == 0 and tested.remembered > 5 and not tested.replaced
