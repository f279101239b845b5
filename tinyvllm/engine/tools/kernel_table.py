"""The dearest kernels of a trace, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from tinyvllm.lazy_dataclass import dataclass

MAX_ROWS = 12


@dataclass(frozen=True)
class KernelRoof:
    """What the device does at most: bytes a second from its memory, operations a second in products of many rows. 0 is not measured."""

    bandwidth: float
    operations: float = 0.0

    def share(self, seconds: float, nbytes: int, flops: int) -> tuple[float, str]:
        """The share of the roof that a kernel reached, and which roof it is under: "memory" or "compute", whichever needs more time for the
        kernel's bytes and operations. (0, "") where neither is known.
        """
        reading = nbytes / self.bandwidth if self.bandwidth else 0.0
        computing = flops / self.operations if self.operations else 0.0
        if seconds <= 0 or not (reading or computing):
            return 0.0, ""
        return max(reading, computing) / seconds, "compute" if computing > reading else "memory"

    def __str__(self) -> str:
        if not self.bandwidth:
            return "no roof was measured"
        computing = f"{self.operations / 1e9:.0f} GFLOP/s" if self.operations else "none of FLOP/s (`tinyvllm plan` measures it)"
        return f"roof {self.bandwidth / 1e9:.0f} GB/s and {computing}"


@dataclass(slots=True)
class KernelTotal:
    """All launches of one kernel in the steps that were sampled."""

    launches: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    flops: int = 0


class KernelTable:
    """Sums by the name of the kernel."""

    def __init__(self, roof: KernelRoof):
        self.totals: dict[str, KernelTotal] = {}
        self.num_steps = 0
        self._roof = roof

    def add(self, name: str, seconds: float, nbytes: int, flops: int) -> None:
        total = self.totals.setdefault(name, KernelTotal())
        total.launches += 1
        total.seconds += seconds
        total.nbytes += nbytes
        total.flops += flops

    def text(self) -> str:
        """The table, or why there is none."""
        if not self.totals:
            return "profile: no kernel was timed: only kernels of captured steps are, and none of the sampled steps was one"
        every = sum(total.seconds for total in self.totals.values())
        ranked = sorted(self.totals.items(), key=lambda item: -item[1].seconds)
        rows: list[tuple[str, ...]] = [("kernel", "launches", "us each", "share", "GB/s", "GFLOP/s", "of roof", "bound")]
        rows += [self._row(name, total, every) for name, total in ranked[:MAX_ROWS]]
        if len(ranked) > MAX_ROWS:
            rest = sum(total.seconds for _, total in ranked[MAX_ROWS:])
            rows.append((f"{len(ranked) - MAX_ROWS} more", "", "", f"{rest / every:.1%}", "", "", "", ""))
        steps = "1 sampled step" if self.num_steps == 1 else f"{self.num_steps} sampled steps"
        return f"profile: kernels of {steps}, {self._roof}\n{_aligned(rows)}"

    def _row(self, name: str, total: KernelTotal, every: float) -> tuple[str, ...]:
        rate = total.nbytes / total.seconds if total.seconds else 0.0
        share, bound = self._roof.share(total.seconds, total.nbytes, total.flops)
        return (
            name,
            str(total.launches),
            f"{1e6 * total.seconds / total.launches:.1f}",
            f"{total.seconds / every:.1%}" if every else "",
            f"{rate / 1e9:.1f}" if rate else "-",
            f"{total.flops / total.seconds / 1e9:.1f}" if total.flops and total.seconds else "-",
            f"{share:.0%}" if bound else "-",
            bound or "-",
        )


def _aligned(rows: Iterable[tuple[str, ...]]) -> str:
    lines = list(rows)
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in lines)
