"""Writes the drawing and the table of rooms in docs/architecture.md from IMPORTS of tests/test_house.py: `python docs/draw_rooms.py`.

An arrow that follows from two others is left out of the drawing (it shows the transitive reduction); the table has them all.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- made by docs/draw_rooms.py -->\n", "<!-- end -->"
Table = dict[str, set[str]]


def reachable(table: Table, room: str) -> set[str]:
    found: set[str] = set()
    todo = list(table[room])
    while todo:
        other = todo.pop()
        if other not in found:
            found.add(other)
            todo += table[other]
    return found


def direct(table: Table, room: str) -> set[str]:
    """The rooms that `room` imports and that none of its other imports leads to."""
    return {other for other in table[room] if not any(other in reachable(table, through) for through in table[room] - {other})}


def drawing(table: Table) -> str:
    arrows = [f"    {room} --> {other}" for room in table for other in sorted(direct(table, room))]
    alone = [f"    {room}" for room in table if not table[room] and not any(room in needs for needs in table.values())]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, *alone, "```"])


def rows(table: Table, reserved: Table) -> str:
    def line(room: str, needs: set[str], note: str = "") -> str:
        return f"| {room}{note} | {', '.join(sorted(needs)) or 'no other room'} |"

    lines = [line(room, needs) for room, needs in table.items()]
    lines += [line(room, needs, " (reserved)") for room, needs in reserved.items()]
    return "\n".join(["| room | may import |", "|---|---|", *lines])


def with_drawing(page: str, table: Table, reserved: Table) -> str:
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{drawing(table)}\n\n{rows(table, reserved)}\n\n{END}{after}"


def main() -> None:
    root = PAGE.parents[1]
    sys.path.insert(0, str(root))  # it imports other modules of the tests
    spec = importlib.util.spec_from_file_location("test_house", root / "tests" / "test_house.py")
    assert spec is not None and spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    PAGE.write_text(with_drawing(PAGE.read_text(), house.IMPORTS, house.RESERVED))


if __name__ == "__main__":
    main()
