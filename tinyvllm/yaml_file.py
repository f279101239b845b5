"""YAML from outside: nodes within a depth and a number, no key twice, no object but texts, numbers, booleans, lists and mappings.

A `Node` keeps the text of a scalar and its line: the reader's own type decides what `off`, `1.10` or `2024-01-01` mean, not YAML's rules.
PyYAML is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tinyvllm.errors import one_line
from tinyvllm.foreign import quoted

MAX_DEPTH = 16  # of lists and mappings in each other
MAX_NODES = 16_384  # keys and values; an alias counts as all that it repeats


class YamlError(ValueError):
    """A text that is not YAML, or beyond the limits. The message is one line; `line` is where, if that is known."""

    def __init__(self, problem: str, line: int | None = None):
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.problem, self.line = problem, line


class Node:
    """One value of a file."""

    def __init__(self, node: Any):
        self._node = node
        self.line: int = node.start_mark.line + 1
        self.is_mapping: bool = node.id == "mapping"
        self.is_list: bool = node.id == "sequence"
        self.is_empty: bool = node.id == "scalar" and node.style is None and node.value == ""
        self.is_null: bool = node.id == "scalar" and node.tag.endswith(":null")
        self.is_plain: bool = node.id == "scalar" and node.style is None  # without quotes

    @property
    def text(self) -> str:
        """A scalar as it is written, without its quotes."""
        return str(self._node.value)

    def items(self) -> list[tuple[str, int, Node]]:
        """Key, line of the key and value of each entry of a mapping."""
        return [(str(key.value), key.start_mark.line + 1, Node(value)) for key, value in self._node.value]

    def entries(self) -> list[Node]:
        """The entries of a list."""
        return [Node(node) for node in self._node.value]

    def value(self) -> Any:
        """As Python objects, by YAML's own rules. YamlError for a scalar that is none, such as a date without such a day."""
        import yaml

        try:
            return yaml.SafeLoader("").construct_document(self._node)
        except (yaml.YAMLError, ValueError, TypeError) as error:
            raise _explained(error, self.line) from None

    def __str__(self) -> str:
        """What an error message says that it got. The text of a value is in it, its entries are not."""
        if self.is_mapping or self.is_list:
            return "a mapping" if self.is_mapping else "a list"
        if self.is_empty or self.is_null:
            return "no value" if self.is_empty else "null"
        return quoted(self.text) if not self.is_plain else one_line(self.text, 60)


def parse_yaml(data: bytes) -> Node | None:
    """The only document of a file; None if there is none. ImportError without PyYAML, YamlError for everything else."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]  # without PyYAML's types
        """Stops at MAX_DEPTH, where PyYAML would recurse to the end of Python's stack."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.depth > MAX_DEPTH:
                raise YamlError(f"lists and mappings in each other, more than {MAX_DEPTH}", self.peek_event().start_mark.line + 1)
            self.depth += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

    text = _decoded(data)
    loader = None
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is not None:
            for number, _ in enumerate(_checked(loader, node, 0), 1):
                if number > MAX_NODES:
                    raise YamlError(f"more than {MAX_NODES} keys and values, those of aliases counted each time")
    except yaml.reader.ReaderError as error:
        raise YamlError(f"the character {chr(error.character)!a} must not be in it", text.count("\n", 0, error.position) + 1) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise _explained(error, None) from None
    finally:
        if loader is not None:
            loader.dispose()
    return None if node is None else Node(node)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlError(f"it must be UTF-8, and the byte {data[error.start]:#04x} is not", data.count(b"\n", 0, error.start) + 1) from None


_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "seq", "map")


def _checked(loader: Any, node: Any, depth: int) -> Iterator[None]:
    """One item for each key and value below a node. YamlError for keys that are there twice, foreign tags, aliases of their parents."""
    line = node.start_mark.line + 1
    if depth > MAX_DEPTH + 1:
        raise YamlError(f"lists and mappings in each other, more than {MAX_DEPTH}: an alias is inside of what it repeats", line)
    _check_tag(node, line)
    yield
    if node.id == "sequence":
        for entry in node.value:
            yield from _checked(loader, entry, depth + 1)
    elif node.id == "mapping":
        keys: set[Any] = set()
        for key, value in node.value:
            keys.add(_new_key(loader, key, keys))
            yield
            yield from _checked(loader, value, depth + 1)


def _check_tag(node: Any, line: int) -> None:
    if node.tag.startswith("!"):
        raise YamlError("a tag (!), whose type is not known here; a text that begins with ! needs quotes", line)
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
        raise YamlError(f"a value of the type {one_line(node.tag, 60)}: expected texts, numbers, booleans, lists and mappings", line)


def _new_key(loader: Any, key: Any, keys: set[Any]) -> Any:
    line = key.start_mark.line + 1
    if key.id != "scalar":
        raise YamlError("a list or a mapping is no key: expected a name", line)
    if key.tag.endswith(":merge"):
        raise YamlError("merge keys (<<) are not read: write the keys themselves", line)
    _check_tag(key, line)
    value = loader.construct_object(key, deep=True)
    if value in keys:
        raise YamlError(f"the key {quoted(key.value)} is there twice", line)
    return value


def _explained(error: Exception, line: int | None) -> YamlError:
    """In one line, without the words of the file that PyYAML quotes: there may be secrets in them."""
    if isinstance(error, YamlError):
        return error
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if "undefined alias" in problem:
        problem = "an alias (*) of nothing; a text that begins with * needs quotes"
    context = getattr(error, "context", None)
    return YamlError(one_line(f"{context}: {problem}" if context else problem), line if mark is None else mark.line + 1)
