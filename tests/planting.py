"""Wrong kernels for tests of the self-test: a constant of the source is changed before it is compiled, on any backend."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyvllm.backends import source
from tinyvllm.backends.cpu import compile as cpu_compile
from tinyvllm.backends.cpu import launch as cpu_launch
from tinyvllm.backends.cuda import launch as cuda_launch
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import launch as metal_launch

# Constants that make a kernel compute something else, by stem; of several names the first that has a value.
WRONG: dict[str, tuple[str, str | Callable[[str], str]]] = {
    "embed": ("V", "1"),
    "norm_qkv_rope_store": ("EPS", "0.5f"),
    "kv_append": ("S", "8"),
    "attention_decode": ("SCALE", "0.5f"),
    "attention_decode_team": ("SCALE", "0.5f"),
    "attention_prefill": ("SCALE", "0.5f"),
    "matmul": ("ACTIVATION", "1"),
    "matvec": ("ACTIVATION", "1"),
    "norm_gate_up_silu": ("EPS", "0.5f"),
    "norm_route": ("EPS", "0.5f"),
    "experts_gate_up_silu": ("EPS", "0.5f"),
    "experts_down": ("C", "1"),
    "list_experts": ("C", "1"),
    "experts_sum": ("C", "1"),
    "gated_delta": ("TILED", "1"),
    "delta_norm": ("EPS", "0.5f"),
    "norm_head": ("EPS", "0.5f"),
    "advance": ("NO_SLOT", "0"),
    "kv_copy": ("BLOCK_BYTES", "160"),
    "sample": ("SAMPLED", "0"),
    "pack_tiles": ("QUANTS|FIELDS", lambda old: re.sub(r"\((\d+)", lambda first: f"({int(first[1]) + 2}", old)),  # two bytes further
}


def changed(stem: str, text: str) -> str:
    names, value = WRONG[stem]
    wrong = value if callable(value) else lambda _: value
    found = [line for name in names.split("|") for line in re.finditer(rf"^#define {name} (.+)$", text, flags=re.MULTILINE)]
    assert found, f"{stem} has no constant {names}"
    start, end = found[0].span(1)
    return text[:start] + wrong(found[0][1]) + text[end:]


def plant(
    monkeypatch: pytest.MonkeyPatch, stems: set[str], target: str | None = None, change: Callable[[str, str], str] = changed
) -> list[str]:
    """Change the text of these kernels, of one variant or of all; the list gets the stem of each that was compiled so."""
    planted: list[str] = []

    def text(kernel: Kernel, instead: Path | None = None) -> str:
        whole = source.kernel_text(kernel, instead)
        if kernel.stem not in stems or target not in (None, kernel.target):
            return whole
        planted.append(kernel.stem)
        return change(kernel.stem, whole)

    from tests.emulator import driver

    for module in (cpu_compile, metal_launch, driver):
        monkeypatch.setattr(module, "kernel_text", text)
    forget_code()
    return planted


def forget_code() -> None:
    """Compile every kernel again, or read it from disk: nothing planted stays in the process."""
    cpu_launch._ahead.clear()
    cuda_launch._ahead.clear()
    for launch in (cpu_launch, cuda_launch, metal_launch):
        launch.machine_code.cache_clear()
    cuda_launch.loaded.cache_clear()
