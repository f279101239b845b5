"""Where `$ref` leads: JSON pointers, anchors and embedded resources of one document. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from tinyvllm.sampling.schema.keywords import CHILD_LISTS, CHILD_MAPS, CHILD_SCHEMAS, wrong


class References:
    """The resources and anchors of a document.

    legacy_id: draft 4, where `id` is what `$id` is later. lone_refs: to draft 7, where an `$id` next to `$ref` has no effect.
    """

    def __init__(self, root: Any, legacy_id: bool, lone_refs: bool):
        self._id_keyword, self._lone_refs = "id" if legacy_id else "$id", lone_refs
        self.root_base = self.base_of(root, "")
        self._resources: dict[str, Any] = {"": root, self.root_base: root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self.dynamic: dict[str, int] = {}  # number of $dynamicAnchor by name
        self.recursive_anchors = 0
        self._index(root)

    def base_of(self, part: Any, base: str) -> str:
        """The base URI inside a schema whose parent has `base`."""
        name = self._id_of(part)
        if not isinstance(name, str) or name.startswith("#"):
            return base
        return urldefrag(_join(base, name))[0]

    def _id_of(self, part: Any) -> Any:
        if not isinstance(part, dict) or (self._lone_refs and "$ref" in part):
            return None
        return part.get(self._id_keyword)

    def _index(self, root: Any) -> None:
        stack, seen = [(root, "")], set[int]()
        while stack:
            part, base = stack.pop()
            if isinstance(part, list):
                stack += [(one, base) for one in part]
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            base = self.base_of(part, base)
            self._add(part, base)
            stack += [(child, base) for child in subschemas(part)]

    def _add(self, part: dict[str, Any], base: str) -> None:
        name = self._id_of(part)
        if isinstance(name, str) and name.startswith("#"):
            self._anchors.setdefault((base, name[1:]), part)
        elif isinstance(name, str):
            self._resources.setdefault(base, part)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := part.get(keyword), str):
                self._anchors.setdefault((base, anchor), part)
        if isinstance(dynamic := part.get("$dynamicAnchor"), str):
            self.dynamic[dynamic] = self.dynamic.get(dynamic, 0) + 1
        self.recursive_anchors += part.get("$recursiveAnchor") is True

    def target(self, path: str, reference: Any, base: str) -> tuple[str, Any, str]:
        """(its pointer, the schema, its base) that a reference at `path` leads to. RequestError if there is none in this document."""
        if not isinstance(reference, str):
            raise wrong(path, "$ref must be a text such as #/$defs/name", reference)
        uri, fragment = (base, reference[1:]) if reference.startswith("#") else urldefrag(_join(base, reference))
        if uri not in self._resources:
            raise wrong(path, "$ref leads outside this schema, and nothing is fetched: put what it means under $defs", reference)
        resource = self._resources[uri]
        if fragment and not fragment.startswith("/"):
            if (uri, fragment) not in self._anchors:
                raise wrong(path, f"$ref leads nowhere in this schema: it has no anchor {fragment[:40]!r}", reference)
            return reference, self._anchors[uri, fragment], uri
        return reference, *self._walk(path, reference, resource, fragment, uri)

    def _walk(self, path: str, reference: str, found: Any, pointer: str, base: str) -> tuple[Any, str]:
        for name in pointer.split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            try:
                found = found[_index_of(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, TypeError, ValueError):
                raise wrong(path, "$ref leads nowhere in this schema", reference) from None
            base = self.base_of(found, base)
        return found, base


def subschemas(part: dict[str, Any]) -> Iterator[Any]:
    """The schemas and lists of schemas inside a schema, also those that only `$ref` reaches."""
    for keyword, value in part.items():
        if keyword in CHILD_SCHEMAS or keyword in CHILD_LISTS:
            yield value
        elif keyword in CHILD_MAPS and isinstance(value, dict):
            yield from value.values()


def _index_of(name: str) -> int:
    if not (name.isascii() and name.isdecimal()) or len(name) > 9:
        raise ValueError(name)
    return int(name)


def _join(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # such as http://[
        return reference
