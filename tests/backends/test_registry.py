"""Which kernel variant runs an op, how the environment forces one, and the reason of every choice."""

from __future__ import annotations

import pytest

from tinyvllm.backends import registry
from tinyvllm.backends.cpu import variants as cpu
from tinyvllm.backends.cuda import call as cuda
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.metal import call as metal
from tinyvllm.backends.registry import BACKENDS, REFERENCE, STEMS, Choice, choices, forget_choices, select
from tinyvllm.backends.source import ENDINGS, kernels_folder
from tinyvllm.errors import ArgumentError, KernelError
from tinyvllm.placement import Placement

CPU = Placement("CPU")
ODD = ShapeFacts(CPU, inputs=5)
REASON = "kernel supports inputs of the weight in multiples of 32; the model has 5"
MAC = Placement("METAL")
X86 = ("x86_64", {"avx2", "fma", "f16c"})


def chosen(stem, placement, shape, facts=None):
    """The variant that was selected, None for the reference."""
    selection = select(stem, placement, shape, facts)
    assert selection is None or selection.backend is BACKENDS[placement.kind]
    return None if selection is None else selection.variant


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    forget_choices()


@pytest.fixture
def processor(monkeypatch):
    """Pretend to be one with these features."""

    def pretend(machine: str, features: set[str]) -> None:
        monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
        monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(features))

    return pretend


AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AMX = {"avx512_bf16", "avx512_vnni", "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("machine", "features", "variant", "skipped"),
    [
        ("x86_64", X86[1] | AVX512 | AMX, "amx", None),
        ("x86_64", X86[1] | AVX512, "avx512", "not amx: the processor has no avx512_bf16"),
        ("x86_64", X86[1], "avx2", "not avx512: the processor has no avx512f, avx512bw"),
        ("x86_64", X86[1] | {"avx_vnni"}, "avxvnni", "not avx512: the processor has no avx512f, avx512bw"),
        ("x86_64", {"avx2", "f16c"} | AVX512, "plain", "not avx2: the processor has no fma"),
        ("x86_64", set(), "plain", "not avx512"),
        ("aarch64", {"asimd"}, "neon", None),
        ("arm64", {"asimd"}, "neon", None),
        ("aarch64", set(), "plain", "not neon: the processor has no asimd"),
    ],
)
def test_the_best_variant_that_the_processor_can_run(processor, monkeypatch, machine, features, variant, skipped):
    """What the processor lacks is no reason of an op: it is said once."""
    processor(machine, features)
    monkeypatch.setattr(cpu, "tiles_refused", lambda: None)
    assert chosen("matmul", CPU, "64x64") == variant
    assert choices() == [Choice("matmul", "64x64", variant, "the best variant for this processor")]
    reasons = registry.skipped_variants(CPU)
    assert reasons == [] if skipped is None else any(reason.startswith(skipped) for reason in reasons)


def test_tiles_that_the_system_does_not_grant_are_not_used(processor, monkeypatch):
    processor("x86_64", X86[1] | AVX512 | AMX)
    monkeypatch.setattr(cpu, "tiles_refused", lambda: "the system does not grant tiles: a sandbox forbids the call")
    assert chosen("matmul", CPU, "64x64") == "avx512"
    assert registry.skipped_variants(CPU) == ["not amx: the system does not grant tiles: a sandbox forbids the call"]


def test_the_environment_forces_a_variant_for_one_op_or_all(monkeypatch, processor):
    processor(*X86)
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=plain, all=ref")
    assert chosen("matmul", CPU, "a") == "plain" and chosen("embed", CPU, "a") is None
    assert all(choice.why == "TINYVLLM_KERNELS asks for it" for choice in choices())
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=ref")
    assert chosen("matmul", CPU, "a") is None and chosen("embed", CPU, "a") == "avx2", "read again at every choice"


def test_an_unsupported_shape_goes_to_the_reference_unless_a_kernel_was_forced_by_name(monkeypatch, processor):
    processor(*X86)
    assert chosen("matmul", CPU, "3x5", ODD) is None
    assert choices() == [Choice("matmul", "3x5", REFERENCE, REASON)]
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=avx2")
    assert chosen("matmul", CPU, "3x5", ODD) is None
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=ref")
    assert chosen("matmul", CPU, "3x5", ODD) is None
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=avx2")
    with pytest.raises(KernelError, match="wants matmul=avx2, which cannot run 3x5: kernel supports inputs"):
        select("matmul", CPU, "3x5", ODD)


def test_a_forced_variant_that_cannot_run_is_an_error(monkeypatch, processor):
    processor(*X86)
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=avx512")
    with pytest.raises(KernelError, match="wants matmul=avx512, but the processor has no avx512f"):
        select("matmul", CPU, "a")
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=neon")
    with pytest.raises(KernelError, match="wants embed=neon; CPU here has amx, avx512, avxvnni, avx2, plain, and ref"):
        select("embed", CPU, "a")
    assert choices() == [], "a failure is not a choice"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("matmull=ref", "there is no op 'matmull'; there are embed, .*, and all"),
        (
            "matmul=avx3",
            "there is no variant 'avx3' for matmul; there are amx, avx512, .*plain, sm_80, .*apple7, apple7_matrix, apple7_merge, and ref",
        ),
        ("matmul", "TINYVLLM_KERNELS must be like .*, got 'matmul'"),
        ("matmul=", "must be like"),
        (",", "must be like"),
    ],
)
def test_unknown_ops_and_variants_are_errors(monkeypatch, text, words):
    monkeypatch.setenv("TINYVLLM_KERNELS", text)
    with pytest.raises(ArgumentError, match=words):
        select("embed", CPU, "a")


@pytest.mark.parametrize("device", ["WEBGPU", "AMD:1"])
def test_a_device_without_kernels(device):
    kind = device.split(":")[0]
    assert chosen("matmul", Placement(device), "a") is None and registry.variants(Placement(device)) == {}
    assert choices() == [Choice("matmul", "a", REFERENCE, f"there are no kernels for {kind} yet")]


def test_choices_are_remembered_once_a_shape_and_forgotten_on_request(processor):
    processor(*X86)
    for shape in ("a", "b", "a"):
        select("matmul", CPU, shape)
    select("embed", CPU, "a")
    assert [(choice.stem, choice.shape) for choice in choices()] == [("matmul", "a"), ("matmul", "b"), ("embed", "a")]
    forget_choices()
    assert choices() == []


def test_the_variants_of_this_machine_name_what_it_lacks(processor):
    processor(*X86)
    variants = registry.variants(Placement("CPU:0"))
    assert list(variants) == ["amx", "avx512", "avxvnni", "avx2", "plain"]
    assert variants["avx2"] is None and variants["plain"] is None and variants["avx512"].startswith("the processor has no avx512f")


@pytest.mark.parametrize("kind", BACKENDS)
def test_every_op_of_a_backend_has_a_source(kind):
    """Of experts, GPUs have products by the sources of `matmul` and others."""
    backend = BACKENDS[kind]
    of_others = set() if kind == "CPU" else {"experts_gate_up_silu", "experts_down"}
    assert backend.stems - of_others <= {path.stem for path in (kernels_folder() / backend.name).glob(f"*{ENDINGS[backend.name]}")}
    assert backend.stems <= set(STEMS) and set(STEMS) - backend.stems <= {"pack_tiles"}


GPUS = [("sm_80", "sm_80", "best variant"), ("sm_90", "sm_90a", "best variant"), ("sm_120", "sm_80", "best variant")]
GPUS += [("sm_75", None, "older than sm_80")]


@pytest.mark.parametrize(("architecture", "variant", "why"), GPUS)
def test_the_variants_of_a_gpu_depend_on_its_architecture(monkeypatch, architecture, variant, why):
    monkeypatch.setattr(cuda, "architecture", lambda device: {"CUDA:1": architecture}[device])
    assert chosen("matmul", Placement("CUDA:1"), "a") == variant and why in choices()[0].why


@pytest.mark.parametrize(("family", "variant"), [("Apple7", "apple7"), ("Apple9", "apple7"), ("Apple6", None), ("Mac2", None)])
def test_the_variant_of_a_mac(monkeypatch, family, variant):
    monkeypatch.setattr(metal, "architecture", lambda device: family)
    assert chosen("matmul", MAC, "a") == variant
    assert variant or f"the GPU is of the family {family}" in choices()[0].why


def test_apples_other_variants_must_be_forced(monkeypatch):
    monkeypatch.setattr(metal, "architecture", lambda device: "Apple9")
    assert list(registry.variants(MAC, "matmul")) == ["apple7", "apple7_matrix"] and list(registry.variants(MAC)) == ["apple7"]
    assert list(registry.variants(MAC, "attention_decode")) == ["apple7", "apple7_merge"]
    assert chosen("matmul", MAC, "a") == chosen("attention_decode", MAC, "a") == "apple7"
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=apple7_matrix,norm_head=apple7_matrix")
    assert [chosen(stem, MAC, "a") for stem in ("matmul", "norm_head", "norm_gate_up_silu")] == ["apple7_matrix"] * 2 + ["apple7"]
    monkeypatch.setenv("TINYVLLM_KERNELS", "attention_decode=apple7_matrix")
    with pytest.raises(KernelError, match="wants attention_decode=apple7_matrix; METAL here has apple7, apple7_merge, and ref"):
        select("attention_decode", MAC, "a")
    monkeypatch.setattr(metal, "architecture", lambda device: "Apple6")
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=apple7_matrix")
    with pytest.raises(KernelError, match="wants matmul=apple7_matrix, but the GPU is of the family Apple6"):
        select("matmul", MAC, "a")


def test_hopper_has_a_variant_of_its_own(monkeypatch):
    monkeypatch.setattr(cuda, "architecture", lambda device: {"CUDA": "sm_90", "CUDA:1": "sm_100"}[device])
    assert [chosen("matmul", Placement(device), "a") for device in ("CUDA", "CUDA:1")] == ["sm_90a", "sm_80"]
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=sm_80")
    assert chosen("matmul", Placement("CUDA"), "b") == "sm_80" and chosen("norm_head", Placement("CUDA"), "b") == "sm_90a"
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=sm_90a")
    with pytest.raises(KernelError, match="wants matmul=sm_90a, but the GPU is sm_100"):
        select("matmul", Placement("CUDA:1"), "a")
    monkeypatch.setenv("TINYVLLM_KERNELS", "embed=sm_90a")
    with pytest.raises(KernelError, match="wants embed=sm_90a; CUDA here has sm_80"):
        select("embed", Placement("CUDA"), "a")


def test_an_op_that_this_backend_has_no_kernel_for(monkeypatch, processor):
    processor(*X86)
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=avx2")
    assert chosen("pack_tiles", CPU, "a") is None and choices()[0].why == "CPU has no kernel for it"
    monkeypatch.setenv("TINYVLLM_KERNELS", "pack_tiles=avx2")
    with pytest.raises(KernelError, match="wants pack_tiles=avx2, which cannot run a: CPU has no kernel"):
        select("pack_tiles", CPU, "a")
