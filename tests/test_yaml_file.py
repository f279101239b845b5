"""YAML from outside: what is read, what is refused, and that hostile files cost little."""

from __future__ import annotations

import pytest

from tinyvllm.yaml_file import MAX_DEPTH, MAX_NODES, YamlError, parse_yaml

LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (letter, letter, b", ".join([b"*%c" % (letter - 1)] * 9)) for letter in range(ord("b"), ord("z"))
)


def test_nodes_keep_text_and_line() -> None:
    root = parse_yaml("\ufeff# first\na: 1.10\nb:\n  - off\n  - 'x'\nc: 2024-01-01\nd: ~\ne:\nno: {}\n".encode())
    assert root is not None and root.is_mapping and root.line == 2
    nodes = {key: (line, node) for key, line, node in root.items()}
    assert list(nodes) == ["a", "b", "c", "d", "e", "no"] and [line for line, _ in nodes.values()] == [2, 3, 6, 7, 8, 9]
    entries = nodes["b"][1].entries()
    assert [entry.text for entry in entries] == ["off", "x"] and [entry.is_plain for entry in entries] == [True, False]
    assert nodes["a"][1].text == "1.10" and nodes["c"][1].text == "2024-01-01"
    assert nodes["d"][1].is_null and not nodes["d"][1].is_empty and nodes["e"][1].is_empty
    assert nodes["b"][1].value() == [False, "x"]


def test_aliases_within_the_limit_are_read() -> None:
    root = parse_yaml(b"a: &x {k: 1}\nb: *x\n")
    assert root is not None and root.value() == {"a": {"k": 1}, "b": {"k": 1}}


@pytest.mark.parametrize("data", [b"", b"\n# nothing\n"])
def test_no_document(data: bytes) -> None:
    assert parse_yaml(data) is None


@pytest.mark.parametrize(
    ("data", "message", "line"),
    [
        (b"k: 1\nk: 2\n", "the key 'k' is there twice", 2),
        (b"a:\n  k: 1\n  'k': 2\n", "the key 'k' is there twice", 3),
        (b"a: [1\n", "while parsing a flow sequence: expected ',' or ']'", 2),
        (b"a: 1\n---\nb: 2\n", "expected a single document", 2),
        (b"\nk: !!python/object/apply:os.getcwd []\n", "a value of the type tag:yaml.org,2002:python/object/apply:os.getcwd", 2),
        (b"k: !foreign 1\n", "a tag (!), whose type is not known here", 1),
        (b"!!binary aGk=: 1\n", "a value of the type tag:yaml.org,2002:binary", 1),
        (b"a: 1\nk: \xff\n", "it must be UTF-8, and the byte 0xff is not", 2),
        (b"a: 1\nk: \x01\n", "the character '\\x01' must not be in it", 2),
        (b"a: *nothing\n", "an alias (*) of nothing", 1),
        (b"a: &x {k: 1}\nb:\n  <<: *x\n", "merge keys (<<) are not read", 3),
        (b"? [1]\n: 2\n", "a list or a mapping is no key", 1),
        (b"[" * 60_000, f"in each other, more than {MAX_DEPTH}", 1),
        (b"- " * 30_000, f"in each other, more than {MAX_DEPTH}", 1),
        (b"? " * 30_000, f"in each other, more than {MAX_DEPTH}", 1),
        (b"a: &x [*x]\n", "an alias is inside of what it repeats", 1),
        (LAUGHS, f"more than {MAX_NODES} keys and values", None),
        (b"? " + b"1" * 5_000 + b"\n: 1\n", "4300 digits", None),
    ],
)
def test_what_is_refused(data: bytes, message: str, line: int | None) -> None:
    with pytest.raises(YamlError) as failure:
        parse_yaml(data)
    assert message in failure.value.problem and "\n" not in str(failure.value) and failure.value.line == line


def test_an_error_does_not_quote_the_line() -> None:
    """A file may hold secrets, and errors go to logs."""
    for data in (
        b"api-key: [sk-secret\nport: 1\n",
        b"api-key: *secret\n",
        b"api-key: !secret\n",
        b"api-key: @secret\n",
        b"api-key: %secret\n",
    ):
        with pytest.raises(YamlError) as failure:
            parse_yaml(data)
        assert "secret" not in str(failure.value)


def test_a_scalar_that_has_no_value() -> None:
    root = parse_yaml(b"a: 2024-13-45\n")
    assert root is not None
    with pytest.raises(YamlError, match="month must be in 1..12"):
        root.value()
