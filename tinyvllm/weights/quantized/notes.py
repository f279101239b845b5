"""What of a quantized checkpoint is not computed as packed, or not used, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tinyvllm.foreign import quoted
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord

RUN_TIME = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale",
            "activation_scale", "input_global_scale")  # fmt: skip


def unused_tensors(stored: Mapping[str, TensorRecord], logical: Mapping[str, Record]) -> tuple[str, ...]:
    """Scales of activations and caches, which the model does without: kernels choose those of x by themselves."""
    return tuple(name for name in stored if name not in logical and name.rsplit(".", 1)[-1] in RUN_TIME)


def without_zero_biases(tensors: Mapping[str, Record]) -> Iterator[str]:
    """The names of the tensors without biases of zeros: AutoGPTQ writes one for every matrix, also where the model has none."""
    for name, record in tensors.items():
        stem, _, last = name.rpartition(".")
        zeros = last == "bias" and isinstance(tensors.get(f"{stem}.weight"), BuiltRecord) and not any(part.any() for part in record.stored)
        if not zeros:
            yield name


def describe(tensors: Mapping[str, Record], unused: tuple[str, ...], unpacked: Mapping[str, str]) -> str | None:
    """One line about the matrices that became floats, by name with the reason, and the tensors that are not used; None for neither."""
    reasons: dict[str, list[str]] = {}
    for name, reason in unpacked.items():
        reasons.setdefault(reason, []).append(name)
    parts = []
    if reasons:
        built = sum(isinstance(record, BuiltRecord) for record in tensors.values())
        listed = "; ".join(f"{_named(names)}: {reason}" for reason, names in list(reasons.items())[:5])
        parts.append(f"{len(unpacked)} of {built} matrices become floats ({listed})")
    if unused:
        counts = Counter(name.rsplit(".", 1)[-1] for name in unused)
        parts.append("not used: " + ", ".join(f"{quoted(suffix)} of {count} modules" for suffix, count in counts.items()))
    return f"quantized checkpoint: {'; '.join(parts)}" if parts else None


def _named(names: list[str]) -> str:
    return f"{quoted(names[0])}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
