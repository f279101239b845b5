"""Which row runs an op, who may say so, and what is said of every choice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tinyvllm.backends import registry
from tinyvllm.backends.registry import ONLY_ON, REFERENCE, STEMS, Choice, choices, forget_choices, select
from tinyvllm.backends.source import ENDINGS, kernels_folder
from tinyvllm.errors import ArgumentError, KernelError
from tinyvllm.placement import Placement

MAC = Placement("METAL")
X86 = ("x86_64", {"avx2", "fma", "f16c"})


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    forget_choices()


@pytest.fixture
def processor(monkeypatch):
    """Pretend to be one with these features."""

    def pretend(machine: str, features: set[str]) -> None:
        monkeypatch.setattr(registry.platform, "machine", lambda: machine)
        monkeypatch.setattr(registry, "cpu_features", lambda: frozenset(features))

    return pretend


AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("machine", "features", "row", "why"),
    [
        ("x86_64", X86[1] | AVX512, "avx512", "the best variant for this processor"),
        ("x86_64", X86[1], "avx2", "not avx512: the processor has no avx512f, avx512bw"),
        ("x86_64", {"avx2", "f16c"} | AVX512, "plain", "not avx2: the processor has no fma"),
        ("x86_64", set(), "plain", "not avx512"),
        ("aarch64", {"asimd"}, "neon", "the best variant for this processor"),
        ("arm64", {"asimd"}, "neon", "the best variant for this processor"),
        ("aarch64", set(), "plain", "not neon: the processor has no asimd"),
    ],
)
def test_the_best_row_that_the_processor_can(processor, machine, features, row, why):
    processor(machine, features)
    assert select("matmul", Placement("CPU"), "64x64") == row
    (choice,) = choices()
    assert (choice.stem, choice.shape, choice.variant) == ("matmul", "64x64", row) and why in choice.why


def test_the_environment_forces_a_row_for_one_op_or_all(monkeypatch, processor):
    processor(*X86)
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=plain, all=ref")
    assert select("matmul", Placement("CPU"), "a") == "plain" and select("embed", Placement("CPU"), "a") is None
    assert all(choice.why == "TINYVLLM_KERNELS asks for it" for choice in choices())
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=ref")
    assert select("matmul", Placement("CPU"), "a") is None and select("embed", Placement("CPU"), "a") == "avx2", "read anew at every choice"


def test_what_the_op_refuses_goes_to_the_reference_unless_it_was_asked_for_by_name(monkeypatch, processor):
    processor(*X86)
    assert select("matmul", Placement("CPU"), "3x5", refused="it is too odd") is None
    assert choices() == [Choice("matmul", "3x5", REFERENCE, "it is too odd")]
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=avx2")
    assert select("matmul", Placement("CPU"), "3x5", refused="it is too odd") is None
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=ref")
    assert select("matmul", Placement("CPU"), "3x5", refused="it is too odd") is None
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=avx2")
    with pytest.raises(KernelError, match="wants matmul=avx2, which cannot run 3x5: it is too odd"):
        select("matmul", Placement("CPU"), "3x5", refused="it is too odd")


def test_a_row_that_cannot_be_had_is_an_error(monkeypatch, processor):
    processor(*X86)
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=avx512")
    with pytest.raises(KernelError, match="wants matmul=avx512, but the processor has no avx512f"):
        select("matmul", Placement("CPU"), "a")
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=neon")
    with pytest.raises(KernelError, match="wants embed=neon; CPU here has avx512, avx2, plain, and ref"):
        select("embed", Placement("CPU"), "a")
    assert choices() == [], "what failed was no choice"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("matmull=ref", "there is no op 'matmull'; there are embed, .*, and all"),
        ("matmul=avx3", "there is no variant 'avx3' for matmul; there are avx512, .*plain, sm_80, sm_90a, apple7, apple7_matrix, and ref"),
        ("matmul", "TINYVLLM_KERNELS must be like .*, got 'matmul'"),
        ("matmul=", "must be like"),
        (",", "must be like"),
    ],
)
def test_words_that_mean_nothing(monkeypatch, text, words):
    monkeypatch.setenv("TINYVLLM_KERNELS", text)
    with pytest.raises(ArgumentError, match=words):
        select("embed", Placement("CPU"), "a")


@pytest.mark.parametrize("device", ["WEBGPU", "AMD:1"])
def test_a_device_without_kernels(device):
    kind = device.split(":")[0]
    assert select("matmul", Placement(device), "a") is None and registry.variants(Placement(device)) == {}
    assert choices() == [Choice("matmul", "a", REFERENCE, f"there are no kernels for {kind} yet")]


def test_choices_are_remembered_once_a_shape_and_forgotten_on_request(processor):
    processor(*X86)
    for shape in ("a", "b", "a"):
        select("matmul", Placement("CPU"), shape)
    select("embed", Placement("CPU"), "a")
    assert [(choice.stem, choice.shape) for choice in choices()] == [("matmul", "a"), ("matmul", "b"), ("embed", "a")]
    forget_choices()
    assert choices() == []


def test_the_rows_of_this_machine_name_what_it_lacks(processor):
    processor(*X86)
    rows = registry.variants(Placement("CPU:0"))
    assert list(rows) == ["avx512", "avx2", "plain"]
    assert rows["avx2"] is None and rows["plain"] is None and rows["avx512"].startswith("the processor has no avx512f")


@pytest.mark.parametrize(("backend", "device"), [("cpu", "CPU"), ("cuda", "CUDA"), ("metal", "METAL")])
def test_every_op_has_a_source(backend, device):
    wanted = {stem for stem in STEMS if device in ONLY_ON.get(stem, (device,))}
    assert wanted <= {path.stem for path in (kernels_folder() / backend).glob(f"*{ENDINGS[backend]}")}


GPUS = [("sm_80", "sm_80", "best variant"), ("sm_90", "sm_80", "best variant"), ("sm_120", "sm_80", "best variant")]
GPUS += [("sm_75", None, "older than sm_80")]


@pytest.mark.parametrize(("architecture", "row", "why"), GPUS)
def test_the_rows_of_a_gpu_go_by_its_architecture(monkeypatch, architecture, row, why):
    monkeypatch.setattr(registry, "Device", {"CUDA:1": SimpleNamespace(arch=architecture)})
    assert select("matmul", Placement("CUDA:1"), "a") == row and why in choices()[0].why


@pytest.mark.parametrize(("family", "row"), [("Apple7", "apple7"), ("Apple9", "apple7"), ("Apple6", None), ("Mac2", None)])
def test_the_row_of_a_mac(monkeypatch, family, row):
    monkeypatch.setattr(registry, "Device", {"METAL": SimpleNamespace(arch=family)})
    assert select("matmul", MAC, "a") == row
    assert row or f"the GPU is of the family {family}" in choices()[0].why


def test_apples_matrix_row_is_for_who_asks(monkeypatch):
    monkeypatch.setattr(registry, "Device", {"METAL": SimpleNamespace(arch="Apple9")})
    assert list(registry.variants(MAC, "matmul")) == ["apple7", "apple7_matrix"] and list(
        registry.variants(MAC)
    ) == ["apple7"]
    assert select("matmul", MAC, "a") == "apple7"
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=apple7_matrix,norm_head=apple7_matrix")
    assert [select(stem, MAC, "a") for stem in ("matmul", "norm_head", "norm_gate_up_silu")] == ["apple7_matrix"] * 2 + [
        "apple7"
    ]
    monkeypatch.setenv("TINYVLLM_KERNELS", "attention_decode=apple7_matrix")
    with pytest.raises(KernelError, match="wants attention_decode=apple7_matrix; METAL here has apple7, and ref"):
        select("attention_decode", MAC, "a")
    monkeypatch.setattr(registry, "Device", {"METAL": SimpleNamespace(arch="Apple6")})
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=apple7_matrix")
    with pytest.raises(KernelError, match="wants matmul=apple7_matrix, but the GPU is of the family Apple6"):
        select("matmul", MAC, "a")


def test_hoppers_own_row_is_for_who_asks(monkeypatch):
    monkeypatch.setattr(registry, "Device", {"CUDA": SimpleNamespace(arch="sm_90"), "CUDA:1": SimpleNamespace(arch="sm_100")})
    monkeypatch.setenv("TINYVLLM_KERNELS", "matmul=sm_90a")
    assert select("matmul", Placement("CUDA"), "a") == "sm_90a" and select("norm_head", Placement("CUDA"), "a") == "sm_80"
    with pytest.raises(KernelError, match="wants matmul=sm_90a, but the GPU is sm_100"):
        select("matmul", Placement("CUDA:1"), "a")
    monkeypatch.setenv("TINYVLLM_KERNELS", "embed=sm_90a")
    with pytest.raises(KernelError, match="wants embed=sm_90a; CUDA here has sm_80"):
        select("embed", Placement("CUDA"), "a")


def test_an_op_that_this_backend_has_no_kernel_for(monkeypatch, processor):
    processor(*X86)
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=avx2")
    assert select("accept_drafts", Placement("CPU"), "a") is None and choices()[0].why == "CPU has no kernel for it"
    monkeypatch.setenv("TINYVLLM_KERNELS", "accept_drafts=avx2")
    with pytest.raises(KernelError, match="wants accept_drafts=avx2, which cannot run a: CPU has no kernel"):
        select("accept_drafts", Placement("CPU"), "a")
