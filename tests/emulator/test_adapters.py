"""Adapters on the emulated GPUs: products that take a bias of each row, and an engine whose batch has two adapters and none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.helpers import USE_TC

from tests.emulator.driver import cuda_device
from tests.emulator.metal_runtime import metal_device
from tests.tiny.adapters import write_adapter
from tests.tiny.delta import write_delta_model
from tinyvllm import LLM, LoRARequest, SamplingParams
from tinyvllm.backends import autotune, registry
from tinyvllm.backends.cases.inputs import GATED, HEAD_DIM, KV_HEADS, OUTPUTS, QKV_OUTPUTS, S, activations, numbers, parts_of
from tinyvllm.backends.cases.site import Site, cached_numbers, empty_batch, realized
from tinyvllm.backends.operands import QKV
from tinyvllm.bridge import download

DEVICES = {"CUDA": cuda_device, "METAL": metal_device}
BASE = {"CUDA": "sm_80", "METAL": "apple7"}
MATRICES = {"CUDA": "sm_90a", "METAL": "apple7_matrix"}
Product = Callable[[np.ndarray | None], np.ndarray]  # from biases [O], those of each row, or none to results [T, ...]


@pytest.fixture(scope="module", params=DEVICES)
def device(request) -> Iterator[str]:
    with DEVICES[request.param](seed=1), autotune.untuned():
        yield request.param


def matmul(site: Site, format: str, T: int) -> tuple[int, Product]:
    weight, rows = site.weight(parts_of(format, (OUTPUTS,), 6)), site.int32(T)
    x, residual = site.place(rows_of(weight.I, T)), site.place(numbers(7, T, OUTPUTS))

    def product(bias: np.ndarray | None) -> np.ndarray:
        own = None if bias is None else site.place(bias)
        return realized(site.backend.matmul(site.variant, x, weight, rows, own, residual, False))[0]

    return OUTPUTS, product


def gate_up(site: Site, format: str, T: int) -> tuple[int, Product]:
    weight, rows = site.weight(parts_of(format, (GATED, GATED), 8)), site.int32(T)
    x, norm = site.place(rows_of(weight.I, T)), site.norm(weight.I)

    def product(bias: np.ndarray | None) -> np.ndarray:
        own = None if bias is None else site.place(bias)
        return realized(site.backend.gate_up_silu(site.variant, x, norm, weight, rows, own))[0]

    return 2 * GATED, product


def heads(site: Site, format: str, T: int, cache_format: str = "F32") -> tuple[int, Product]:
    """Queries, and the keys and values of each row."""
    weight, angles = site.weight(parts_of(format, QKV_OUTPUTS, 10)), site.place(numbers(12, T, HEAD_DIM))
    x, norm, slots = site.place(rows_of(weight.I, T)), site.norm(weight.I), np.random.default_rng(T).permutation(3 * S)[:T]
    batch = empty_batch(site, slots=site.int32(*slots.tolist()), rows=site.int32(T))

    def product(bias: np.ndarray | None) -> np.ndarray:
        cache = site.cache(cache_format, np.ones((3, 2, KV_HEADS, S, HEAD_DIM), np.float32))
        qkv = QKV(weight, None if bias is None else site.place(bias))
        q, after = site.backend.norm_qkv_rope_store(site.variant, x, norm, qkv, weight, angles, cache, batch)
        Tensor.realize(q, *after)
        stored = cached_numbers(cache_format, cache).transpose(0, 3, 1, 2, 4).reshape(3 * S, -1)[slots]
        return np.concatenate([download(q).reshape(T, -1), stored], axis=1)

    return sum(QKV_OUTPUTS), product


def packed_heads(site: Site, format: str, T: int) -> tuple[int, Product]:
    return heads(site, format, T, "KV_INT8")


def rows_of(I: int, T: int) -> np.ndarray:
    return activations(I)[np.arange(T) % 5] * np.linspace(0.5, 1.5, T, dtype=np.float32)[:, None]


CASES = [(matmul, "Q4_0", 3, BASE), (gate_up, "Q4_0", 20, BASE), (heads, "BF16", 3, BASE)]
LONG = [(matmul, "BF16", 20, BASE), (gate_up, "BF16", 3, BASE), (heads, "BF16", 20, BASE)]
LONG += [(product, "Q8_0+BF16", T, BASE) for product in (gate_up, packed_heads) for T in (3, 20)]
LONG += [(product, "BF16", T, MATRICES) for product in (matmul, gate_up) for T in (16, 264)]


@pytest.mark.parametrize("make, format, T, variants", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_products_take_a_bias_of_each_row(device, make, format, T, variants):
    each_row_has_its_bias(*make(Site(registry.BACKENDS[device], variants[device], device), format, T), T)


@pytest.mark.long
@pytest.mark.parametrize("device", ["METAL"], indirect=True)
@pytest.mark.parametrize("make", [matmul, gate_up, heads])
def test_products_in_pieces_take_a_bias_of_each_row(device, make, monkeypatch):
    """As on a Mac whose matrices have another layout: sixteen rows at a time."""
    backend = registry.BACKENDS[device]
    monkeypatch.setitem(backend._layouts, device, "another one")
    each_row_has_its_bias(*make(Site(backend, BASE[device], device), "Q4_0", 20), 20)


def each_row_has_its_bias(O: int, product: Product, T: int) -> None:
    """A bias of -0 leaves the bits of a product without one; a row's own has the bits of the same bias for all rows."""
    biases = numbers(13, T, O)
    biases[::2] = -0.0
    got, plain = product(biases), product(None)
    assert (got[::2].view(np.uint32) == plain[::2].view(np.uint32)).all()
    for row in {1, (T - 2) | 1}:
        assert (got[row].view(np.uint32) == product(biases[row])[row].view(np.uint32)).all() and (got[row] != plain[row]).any()


PROMPTS = [{"prompt_token_ids": [255, *range(start, start + length)]} for start, length in ((65, 9), (70, 3), (97, 5))]
OPTIONS = {"max_model_len": 64, "max_num_seqs": 4, "num_blocks": 16, "speculative_config": "off", "dtype": "float16", "max_loras": 2,
           "skip_tokenizer_init": True}  # fmt: skip


def answers(llm: LLM, lora: list[LoRARequest | None]) -> tuple[list[list[int]], list[list[dict[int, float]]]]:
    """Greedy tokens, and the log-probabilities of the best ones."""
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3), lora_request=lora)
    first = [output.outputs[0] for output in outputs]
    return [one.token_ids for one in first], [[{t: p.logprob for t, p in step.items()} for step in one.logprobs] for one in first]


@pytest.mark.long
@pytest.mark.parametrize("recurrent", [False, True])
def test_two_adapters_and_none_in_a_batch(device, recurrent, tiny_model, tmp_path, monkeypatch):
    """The CPU's tokens, by kernels; a request without an adapter has the bits that it has in a batch without adapters."""
    monkeypatch.setattr(USE_TC, "value", 0)  # what has no kernel would use matrix instructions that the emulator does not have
    model = write_delta_model(tmp_path / "model") if recurrent else tiny_model
    folders = [write_adapter(tmp_path / name, model, rank=rank, seed=rank) for name, rank in (("first", 4), ("second", 7))]
    first, second = (LoRARequest(folder.name, lora_path=str(folder)) for folder in folders)
    with LLM(model, device="CPU", enable_lora=True, **OPTIONS) as cpu:
        expected, without = answers(cpu, [first, None, second])[0], answers(cpu, [None] * 3)[0]
    registry.forget_choices()
    with LLM(model, device=device, enable_lora=True, enable_prefix_caching=False, **OPTIONS) as gpu:
        tokens, logprobs = answers(gpu, [first, None, second])
        plain_tokens, plain = answers(gpu, [None] * 3)
    assert tokens == expected and plain_tokens == without and tokens[0] != without[0] and tokens[2] != without[2]
    assert logprobs[1] == plain[1] and logprobs[0] != plain[0]
    chosen = {choice.stem: choice.variant for choice in registry.choices(device) if "load" not in choice.shape}
    assert chosen["lora_bias"] == BASE[device] and set(chosen.values()) <= {BASE[device], MATRICES[device]}
