"""The self-test of kernels on the CPU: wrong kernels are replaced and named, verdicts are remembered, a kernel that crashes is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.ops.inputs import int32, numbers, packed, realized
from tests.planting import WRONG, forget_code, plant
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import collecting, registry, selftest, verdicts
from tinyvllm.backends.cpu import call as cpu
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.selftest import test_kernels as check_kernels
from tinyvllm.backends.verdicts import CRASHED, FILE, MAX_KEYS, Verdicts
from tinyvllm.bridge import kept as kept_on_disk
from tinyvllm.errors import KernelError, ToolchainError
from tinyvllm.ops.linear import linear
from tinyvllm.placement import Placement
from tinyvllm.runner import kept as kept_by_runner
from tinyvllm.storage.cache import CacheFolder
from tinyvllm.storage.folders import require_private

CPU = Placement("CPU")
BEST, NEXT = registry.usable_variants(CPU)[:2]
_PRODUCT = {"inputs": 96, "outputs": 64, "format": "BF16", "layout": "panels"}
_CACHE = {"cache_format": "BF16", "head_dim": 64}
NEEDS = {
    "embed": ShapeFacts(CPU, **_PRODUCT),
    "norm_qkv_rope_store": ShapeFacts(CPU, **_PRODUCT, **_CACHE),
    "kv_append": ShapeFacts(CPU, **_CACHE),
    "attention_decode": ShapeFacts(CPU, **_CACHE),
    "attention_prefill": ShapeFacts(CPU, **_CACHE),
    "matmul": ShapeFacts(CPU, **_PRODUCT),
    "norm_gate_up_silu": ShapeFacts(CPU, **_PRODUCT),
    "norm_head": ShapeFacts(CPU, **_PRODUCT),
    "norm_route": ShapeFacts(CPU, **_PRODUCT | {"format": "F32"}),
    "experts_gate_up_silu": ShapeFacts(CPU, **_PRODUCT),
    "experts_down": ShapeFacts(CPU, **_PRODUCT),
    "advance": ShapeFacts(CPU),
    "kv_copy": ShapeFacts(CPU, block_bytes=320),
    "sample": ShapeFacts(CPU, vocabulary=300),
}
MOVERS = ("advance", "kv_copy")  # whose compilation takes no time


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    monkeypatch.setenv("TINYVLLM_SELFTEST", "on")
    registry.forget_replaced()
    yield
    monkeypatch.undo()
    forget_code()
    registry.forget_replaced()
    registry.forget_choices()


@pytest.fixture
def folder(monkeypatch, tmp_path) -> CacheFolder:
    """Where verdicts are kept; compiled kernels stay where they are."""
    cache = CacheFolder(require_private(tmp_path / "cache"))
    monkeypatch.setattr(selftest, "open_cache", lambda: cache)
    return cache


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The cases that were launched, by name."""
    names: list[str] = []
    run = selftest.run

    def noted(case, site):
        if not collecting._collected:
            names.append(f"{site.variant} {case.name}")
        return run(case, site)

    monkeypatch.setattr(selftest, "run", noted)
    return names


def check(*stems: str):
    return check_kernels(CPU, lambda: [(stem, NEEDS[stem]) for stem in stems])


def kept(folder: CacheFolder) -> list[dict[str, object]]:
    return list(json.loads(folder.read(FILE) or b"{}").values())


@pytest.mark.parametrize("stem", NEEDS)
def test_a_wrong_kernel_is_replaced_by_the_next_variant_and_named(monkeypatch, folder, caplog, stem):
    planted = plant(monkeypatch, {stem}, BEST)
    report = check(stem)
    assert planted
    (name,) = report.replaced
    assert name.startswith(f"{BEST} {stem}") and (report.tested, report.remembered) == (2, 0)
    (line,) = [record.getMessage() for record in caplog.records if "self-test" in record.getMessage()]
    for words in (f"the kernel {stem}", f"variant {BEST}, is wrong on CPU", f"; {NEXT} is used instead", f"TINYVLLM_KERNELS={stem}={BEST}"):
        assert words in line
    assert "largest error" in line or "not finite" in line or "shape" in line
    selection = registry.select(stem, CPU, "a", NEEDS[stem])
    assert selection is not None and selection.variant == NEXT
    assert registry.choices()[-1].why.startswith(f"replaced: {BEST} failed its self-test: ")


def test_right_kernels_pass_once_and_nothing_is_launched_at_the_next_start(folder, launched):
    first = check(*MOVERS, "kv_append")
    assert (first.tested, first.remembered, first.replaced) == (3, 0, {}) and len(launched) == 3
    launched.clear()
    second = check(*MOVERS, "kv_append")
    assert (second.tested, second.remembered, second.replaced) == (0, 3, {}) and launched == []
    assert str(second).startswith("self-test: 0 tested now, 3 known from earlier starts, 0 replaced, ")


def test_a_remembered_failure_is_not_launched_again_and_named_again(monkeypatch, folder, launched, caplog):
    plant(monkeypatch, {"advance"}, BEST)
    check("advance")
    registry.forget_replaced()
    caplog.clear()
    launched.clear()
    report = check("advance")
    assert launched == [] and report.remembered == 2 and f"{BEST} advance" in report.replaced
    assert "is used instead" in caplog.text
    assert registry.select("advance", CPU, "a", NEEDS["advance"]).variant == NEXT  # type: ignore[union-attr]


def test_when_all_variants_fail_the_reference_runs(monkeypatch, folder, caplog):
    variants = registry.usable_variants(CPU)
    plant(monkeypatch, {"matmul"})
    report = check("matmul")
    assert len(report.replaced) == len(variants) and f"; {registry.REFERENCE} is used instead" in caplog.text
    x, weight = realized(numbers(3, 96)), packed("BF16", 64, 96)
    got = linear(x, weight, int32(3)).numpy()
    assert registry.choices()[-1].variant == registry.REFERENCE
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=ref")
    np.testing.assert_array_equal(got, linear(x, weight, int32(3)).numpy())


def test_a_kernel_that_does_not_compile_is_replaced(monkeypatch, folder):
    plant(monkeypatch, {"kv_copy"}, BEST, lambda stem, text: text + "\n#error planted\n")
    assert "does not compile" in check("kv_copy").replaced[f"{BEST} kv_copy"]
    assert registry.replaceable_variant("kv_copy", CPU, NEEDS["kv_copy"]) == NEXT


def test_a_forced_variant_is_neither_tested_nor_replaced(monkeypatch, folder, launched):
    plant(monkeypatch, {"advance"}, BEST)
    monkeypatch.setenv("TINYVLLM_KERNELS", f"advance={BEST}")
    assert check("advance").replaced == {} and launched == []
    monkeypatch.delenv("TINYVLLM_KERNELS")
    assert check("advance").replaced
    monkeypatch.setenv("TINYVLLM_KERNELS", f"advance={BEST}")
    assert registry.select("advance", CPU, "a", NEEDS["advance"]).variant == BEST  # type: ignore[union-attr]


def test_off_tests_nothing_and_always_tests_at_every_start(monkeypatch, folder, launched):
    plant(monkeypatch, {"kv_copy"}, BEST)
    monkeypatch.setenv("TINYVLLM_SELFTEST", "off")
    report = check(*MOVERS)
    assert launched == [] and str(report) == "self-test: off (TINYVLLM_SELFTEST)"
    assert registry.replaceable_variant("kv_copy", CPU, NEEDS["kv_copy"]) == BEST, "red with the mechanism off: the wrong kernel runs"
    monkeypatch.setenv("TINYVLLM_SELFTEST", "always")
    for _ in range(2):
        launched.clear()
        registry.forget_replaced()
        assert check(*MOVERS).tested == len(launched) == 3


def test_a_kernel_that_passes_again_is_used_again(monkeypatch, folder):
    with monkeypatch.context() as planted:
        plant(planted, {"advance"}, BEST)
        assert check("advance").replaced
    forget_code()
    registry.forget_replaced()
    monkeypatch.setenv("TINYVLLM_SELFTEST", "always")
    assert check("advance").replaced == {}
    monkeypatch.setenv("TINYVLLM_SELFTEST", "on")
    assert check("advance").replaced == {} and kept(folder)[0]["failed"] == {}


def test_another_compiler_or_driver_tests_again_and_old_keys_are_dropped(monkeypatch, folder, launched):
    check("advance")
    for version in range(2 * MAX_KEYS):
        monkeypatch.setattr(cpu.CpuBackend, "identity", lambda self, placement, v=version: f"driver {v}")
        launched.clear()
        assert check("advance").tested == len(launched) == 1
        assert check("advance").remembered == 1
    assert len(kept(folder)) == MAX_KEYS


def test_another_source_tests_again(monkeypatch, folder, tmp_path):
    one = selftest._digest("cpu", "x")
    other = tmp_path / "answers.npz"
    other.write_bytes(selftest.ANSWERS.read_bytes() + b"\0")
    monkeypatch.setattr(selftest, "ANSWERS", other)
    selftest._digest.cache_clear()
    assert selftest._digest("cpu", "x") != one
    assert selftest._digest("cpu", "x") != selftest._digest("cpu", "y") != selftest._digest("cuda", "y")
    selftest._digest.cache_clear()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"%b": 5}', b'{"%b": {"passed": 1}}', b'{"%b": {"passed": [1], "failed": {}}}',
        b'{"%b": {"passed": [], "failed": []}}', b'{"%b": {"passed": ["advance"], "failed": {"x": 1}}}',
        b'{"%b": {"passed": [], "failed": {}, "testing": 4}}',
    ],
)  # fmt: skip
def test_a_file_of_another_format_is_as_none(folder, launched, content):
    check("advance")
    key = next(iter(json.loads(folder.read(FILE) or b"")))
    folder.write(FILE, content.replace(b"%b", key.encode()))
    launched.clear()
    assert check("advance").tested == len(launched) == 1


def test_a_damaged_file_is_tested_again(folder, launched):
    check("advance")
    path = folder.path / FILE  # type: ignore[operator]
    path.write_bytes(path.read_bytes().replace(b"advance", b"bdvance"))
    launched.clear()
    assert check("advance").tested == len(launched) == 1


@pytest.mark.parametrize("cache", [None, CacheFolder(None)])
def test_without_a_cache_folder_every_start_tests(monkeypatch, launched, cache):
    monkeypatch.setattr(selftest, "open_cache", lambda: cache)
    for _ in range(2):
        launched.clear()
        assert check("advance").tested == len(launched) == 1


def test_without_a_compiler_nothing_is_tested_and_nothing_replaced(monkeypatch, folder, launched):
    """A copied cache folder works where there is no compiler: the model's kernels are in it, those of the test are not."""

    def none(*arguments):
        raise ToolchainError("toolchain: no C compiler")

    monkeypatch.setattr(selftest, "run", none)
    report = check("advance")
    assert report.replaced == {} and "not tested: toolchain: no C compiler" in str(report) and not kept(folder)[0]["passed"]
    monkeypatch.undo()


def test_a_device_that_does_not_work_after_a_failure_ends_the_start_with_the_kernels_name(monkeypatch, folder):
    def fails(*arguments):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(selftest, "run", fails)
    monkeypatch.setattr(selftest, "download", fails)
    with pytest.raises(KernelError, match=f"CPU .* does not work any more after {BEST} advance; start again"):
        check("advance")
    assert kept(folder)[0]["failed"] == {f"{BEST} advance": "RuntimeError: illegal address"}


def test_running_out_of_memory_is_no_kernels_fault(monkeypatch, folder):
    def fails(*arguments):
        raise MemoryError

    monkeypatch.setattr(selftest, "run", fails)
    with pytest.raises(MemoryError):
        check("advance")
    assert kept(folder)[0]["failed"] == {} and "testing" not in kept(folder)[0]


SCRIPT = """
import sys
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device
start_device("CPU", cache_folder())
from tinyvllm.backends import registry, source
from tinyvllm.backends.cpu import compile
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.selftest import test_kernels
from tinyvllm.placement import Placement
def text(kernel):
    whole = source.kernel_text(kernel)
    trap = kernel.stem == "advance" and kernel.target == sys.argv[1]
    return whole.replace("finish_alone(team);\\n}", "__builtin_trap();\\n}") if trap else whole
compile.kernel_text = text
cpu = Placement("CPU")
report = test_kernels(cpu, lambda: [("kv_copy", ShapeFacts(cpu, block_bytes=320)), ("advance", ShapeFacts(cpu))])
print(report.tested, report.replaced, registry.replaceable_variant("advance", cpu, ShapeFacts(cpu)))
"""


def test_a_kernel_that_ends_the_process_is_skipped_at_the_next_start(tmp_path):
    """An illegal instruction or address cannot be caught: the mark that was set before tells the next process."""
    environ = os.environ | {"TINYVLLM_CACHE": str(tmp_path / "cache"), "TINYVLLM_SELFTEST": "on"}

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", SCRIPT, BEST], env=environ, capture_output=True, text=True, timeout=120)

    first = start()
    assert first.returncode < 0, f"ended by a signal, not by {first.returncode}: {first.stderr}"
    second = start()
    assert second.stdout.split() == f"1 {{'{BEST} advance': '{CRASHED}'}} {NEXT}".split(), second.stdout + second.stderr
    assert f"variant {BEST}, is wrong on CPU" in second.stderr and CRASHED in second.stderr
    third = start()
    assert third.stdout.startswith("0 {") and third.returncode == 0, third.stdout + third.stderr


def test_the_mark_of_a_process_that_is_testing_is_no_crash(folder):
    """Without the lock a second process would take the first one's mark for a failure."""
    first, second = Verdicts(folder, "key"), Verdicts(folder, "key")
    with first.turn(), first.testing("avx512 matmul"):
        assert kept(folder)[0]["testing"] == "avx512 matmul"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verdicts, "WAIT_SECONDS", 0)
            with second.turn():
                assert second.failed == {}
    with second.turn():
        assert second.failed == {}
    with first.turn(), first.testing("avx512 matmul"):
        left = folder.read(FILE)
    folder.write(FILE, left or b"")
    with second.turn():
        assert second.failed == {"avx512 matmul": CRASHED}
    assert kept(folder)[0]["failed"] == {"avx512 matmul": CRASHED} and "testing" not in kept(folder)[0]


def test_an_engine_with_a_wrong_kernel_gives_the_tokens_of_the_next_variant(monkeypatch, folder):
    """Seen red: without the self-test the planted kernel changes the tokens."""
    options = dict(max_model_len=128, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": [0, 40, 41, 42]}

    def tokens(**environ: str) -> list[int]:
        for name, value in ({"TINYVLLM_SELFTEST": "off", "TINYVLLM_KERNELS": ""} | environ).items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        forget_code()
        with LLM(**options) as llm:  # type: ignore[arg-type]
            return llm.generate([prompt], params)[0].outputs[0].token_ids

    right = tokens(TINYVLLM_KERNELS=f"matmul={NEXT}")
    plant(monkeypatch, {"matmul"}, BEST)
    assert tokens() != right
    assert tokens(TINYVLLM_SELFTEST="on") == right
    ran = {choice.shape: choice for choice in registry.choices("CPU") if choice.stem == "matmul"}
    assert {(choice.variant, choice.why[:9]) for shape, choice in ran.items() if "load" not in shape} == {(NEXT, "replaced:")}


OPTIONS = dict(max_model_len=128, skip_tokenizer_init=True)
PROMPT = {"prompt_token_ids": [0, 40, 41, 42]}


def generated(llm: LLM, max_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].outputs[0].token_ids


def test_a_steps_kernels_are_tested_before_it_runs_for_the_first_time_and_not_earlier(folder, launched):
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        assert launched == []
        generated(llm, 1)
        assert f"{BEST} attention_prefill BF16 D=64" in launched and f"{BEST} norm_head BF16" in launched
        assert not any("attention_decode" in name or "advance" in name for name in launched)
        before = len(launched)
        generated(llm, 3)
        assert f"{BEST} attention_decode BF16 D=64" in launched[before:] and llm.engine.runner.self_test.tested == len(launched)
        generated(llm, 5)
        assert len(launched) == len(set(launched)), "each once"


def test_a_wrong_kernel_that_only_decodes_have_is_replaced_before_the_first_decode(monkeypatch, folder):
    monkeypatch.setenv("TINYVLLM_KERNELS", f"attention_decode={NEXT}")
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        right = generated(llm, 6)
    monkeypatch.delenv("TINYVLLM_KERNELS")
    plant(monkeypatch, {"attention_decode"}, BEST)
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        assert generated(llm, 6) == right
        assert [*llm.engine.runner.self_test.replaced] == [f"{BEST} attention_decode BF16 D=64"]


def test_a_kept_step_with_a_kernel_that_fails_now_is_captured_again(monkeypatch, folder, launched):
    """As after a change of the processor's microcode or of the compiler: the kept step was captured when the kernel passed."""
    monkeypatch.setenv("TINYVLLM_KEEP_STEPS", "1")
    for module in (kept_on_disk, kept_by_runner):
        monkeypatch.setattr(module, "open_cache", lambda: folder)
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        right = generated(llm, 4)
    launched.clear()
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        loaded = llm.engine.runner.capture_work().loaded
        assert generated(llm, 4) == right and launched == []
        assert llm.engine.runner.capture_work().loaded > loaded
    monkeypatch.setattr(cpu.CpuBackend, "identity", lambda self, placement: "another")
    wrong = selftest.wrong
    monkeypatch.setattr(selftest, "wrong", lambda case, *rest: "planted" if case.stem == "matmul" else wrong(case, *rest))
    registry.forget_choices()
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        generated(llm, 4)
        assert f"{BEST} matmul BF16" in llm.engine.runner.self_test.replaced
    ran = {choice.variant for choice in registry.choices("CPU") if choice.stem == "matmul" and "load" not in choice.shape}
    assert ran == {registry.REFERENCE}, "every variant fails here"


def test_every_stem_can_be_planted():
    assert set(NEEDS) <= set(WRONG)
