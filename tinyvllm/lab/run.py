"""The cells of a sweep one after another: finished ones are skipped, a failed one costs itself, and each is reported when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tinyvllm.errors import ArgumentError, TinyvllmError, one_line
from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.measure import Record, Reference, measure
from tinyvllm.lab.prompts import Prompts, digest
from tinyvllm.lab.sweep import Cell, Sweep
from tinyvllm.lab.target import Target

MAX_KEPT_TOKENS = 4 << 20  # output tokens of a baseline, which its record keeps: below the 32 MiB of a line
COSTS = "costs"  # the kind of the record with the cost curve; the others are cells


class SweepRun:
    """`records` are those of the sweep's cells in their order, and of its cost curve, as far as they are known."""

    def __init__(self, sweep: Sweep, target: Target, prompts: Prompts, earlier: Iterable[Mapping[str, Any]] = ()):
        """`earlier` are the records of a file of results; those of other sweeps are ignored. A cell that failed is measured again."""
        self.sweep, self._target, self._prompts = sweep, target, prompts
        self.cells = sweep.cells()
        _check_size(sweep, prompts)
        about = dict(target.about()) | {"prompts": digest(prompts)}
        self._keys = {cell: sweep.key_of(cell, about | dict(target.about_drafter(cell.drafter))) for cell in self.cells}
        self._about = about
        known = {record["key"]: dict(record) for record in earlier if not record.get("error")}
        self._records: dict[str, Record] = {key: known[key] for key in (*self._keys.values(), self.costs_key) if key in known}

    @property
    def costs_key(self) -> str:
        """The key of the cost curve: it does not depend on prompts or settings of generation."""
        named = {name: value for name, value in self._about.items() if name != "prompts"}
        return f"{COSTS} {sorted(named.items())} {self.sweep.cost_rows}"

    @property
    def records(self) -> list[Record]:
        return [self._records[key] for cell in self.cells if (key := self._keys[cell]) in self._records]

    @property
    def curve(self) -> StepCosts | None:
        """The curve of the sweep's description, or the measured one."""
        if self.sweep.costs is not None:
            return self.sweep.costs
        points = self._records.get(self.costs_key, {}).get("curve")
        return StepCosts.of([(int(rows), float(ms)) for rows, ms in points]) if points else None

    @property
    def missing(self) -> list[Cell]:
        """The cells that are still to be measured."""
        return [cell for cell in self.cells if self._keys[cell] not in self._records]

    def run(self, report: Callable[[Record], None], tell: Callable[[Cell, TinyvllmError], None]) -> int:
        """Measure what is missing. `report` gets each new record, `tell` each cell that failed; returns the number of those."""
        failed = 0
        if self.missing and self.curve is None and (curve := self._target.costs(self.sweep.cost_rows)) is not None:
            self._add({"key": self.costs_key, "kind": COSTS, "curve": curve.pairs()}, report)
        for cell in self.missing:
            key = self._keys[cell]
            try:
                record = measure(self.sweep, cell, self._prompts[cell.prompts], self._target, self._reference(cell))
                self._add({"key": key, "kind": "cell", "error": None, **record}, report)
            except TinyvllmError as error:
                failed += 1
                report({"key": key, "kind": "cell", **cell.axes(), "error": one_line(str(error))})
                tell(cell, error)
        return failed

    def _add(self, record: Record, report: Callable[[Record], None]) -> None:
        self._records[record["key"]] = record
        report(record)

    def _reference(self, cell: Cell) -> Reference | None:
        if cell.is_baseline or not self.sweep.has_baseline:
            return None
        record = self._records.get(self._keys[cell.baseline])
        if record is None:
            raise TinyvllmError("its baseline without drafts failed: there is nothing to compare it with")
        return Reference.of(record)


def _check_size(sweep: Sweep, prompts: Prompts) -> None:
    """ArgumentError if a baseline's record, a line that is read again, would hold too many tokens."""
    for name, each in prompts.items():
        jobs = max(len(each), max(sweep.batch_sizes)) * sweep.repeats
        if jobs * sweep.max_tokens > MAX_KEPT_TOKENS:
            raise ArgumentError(
                f"prompts {name}: {len(each)} prompts, {sweep.repeats} repeats and max_tokens {sweep.max_tokens} are "
                f"{jobs * sweep.max_tokens} tokens in one cell, and at most {MAX_KEPT_TOKENS} are kept; lower one of them"
            )


def broken_promises(records: Sequence[Record]) -> list[Record]:
    """The records whose tokens differ from the baseline's although their policy is exact: a defect. What a server does is its own."""
    return [record for record in records if record["exact"] is False and not record["lossy"] and record["method"] != "server"]
