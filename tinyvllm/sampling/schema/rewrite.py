"""One schema, and all that can be reached from it, rewritten into the keywords that the grammar enforces.

Keywords that the grammar has are copied, with their schemas rewritten. The others become schemas that must hold too (allOf). What
needs a look at other rewritten schemas (`not`, `if`, `oneOf`, ...) leaves an empty schema in its place, which is filled when everything
has been reached: a reference may lead to a schema that is still being rewritten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from tinyvllm.errors import RequestError
from tinyvllm.sampling.schema.apart import Comparison, equal
from tinyvllm.sampling.schema.keywords import (
    ANNOTATIONS,
    DIALECTS,
    ENFORCED,
    FORMATS,
    MAX_ALTERNATIVES,
    MAX_MULTIPLE,
    MAX_OPTIONAL,
    NUMBER_FORMATS,
    automaton_states,
    check_value,
    check_values,
    common_multiple,
    misspelt_format,
    misspelt_keyword,
    pointer,
    wrong,
)
from tinyvllm.sampling.schema.negation import Negation, Schema, all_of, any_of
from tinyvllm.sampling.schema.patterns import PatternError, rust_pattern, rust_patterns
from tinyvllm.sampling.schema.references import References

MAX_SCHEMAS = 50_000  # that are reached, counted again at each place; llguidance reads as many
_MAX_CONTAINED = 32  # items that minContains forces
_MAX_COUNT = 2**31  # no output gets there: longer texts and lists need no bound
_MAX_INTEGER = 2**63 - 1024  # the grammar has its integers in 64 bits, and their bounds in floating point
_MAX_UNIQUE = 6  # values of uniqueItems whose orders are written down
_CONDITIONAL = frozenset({  # what they evaluate depends on the output
    "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
})  # fmt: skip


class Rewriter:
    """Rewrites one document. lenient: keywords that cannot be enforced are left out, and named in `ignored`."""

    def __init__(self, root: Any, lenient: bool):
        self._root, self._lenient = root, lenient
        dialect = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self._lone_refs = any(old in dialect for old in DIALECTS[:3])  # keywords next to $ref have no effect
        self._references = References(root, "draft-04" in dialect, self._lone_refs)
        self._definitions: dict[str, Any] = {}  # rewritten, by reference
        self._names: dict[int, str] = {}  # references by the id of the schema that they lead to
        self._queue: list[tuple[str, str, Any, str]] = []  # reference, path, schema and base, not rewritten yet
        self._deferred: list[Callable[[], None]] = []
        self._inexact: set[int] = set()
        self._comparison = Comparison(self._definitions)
        self._negation = Negation(self._definitions, self._comparison, self._inexact)
        self._reached = 0
        self._steps = Decimal(1)
        self.ignored: dict[str, None] = {}  # places of keywords without effect, in order

    def document(self) -> Schema:
        """The whole schema. RequestError for what cannot be enforced."""
        if isinstance(self._root, dict):
            self._names[id(self._root)] = "#"
        root = self.schema("#", self._root, "")
        self._definitions["#"] = root
        while self._queue:
            name, path, part, base = self._queue.pop()
            self._definitions[name] = self.schema(path, part, base)
        for fill in self._deferred:
            fill()
        named = {name.removeprefix("#/$defs/"): part for name, part in self._definitions.items() if name != "#"}
        return {**root, "$defs": named} if named and isinstance(root, dict) else root

    def schema(self, path: str, part: Any, base: str) -> Schema:
        """One schema and those inside it."""
        if isinstance(part, bool):
            return part
        if not isinstance(part, dict):
            raise wrong(path, "a schema must be an object, true or false", part)
        self._reached += 1
        if self._reached > MAX_SCHEMAS:
            raise RequestError(f"structured_outputs: json: more than {MAX_SCHEMAS} schemas are reached: cut the schema down")
        return _Rewriting(self, path, part, self._references.base_of(part, base)).result()

    # for _Rewriting

    def ignore(self, path: str) -> None:
        """Note a keyword without effect."""
        self.ignored.setdefault(path)

    def refuse(self, path: str, reason: str, value: object) -> None:
        """RequestError for a keyword that cannot be enforced; in a lenient reading it is left out and named."""
        if not self._lenient:
            raise wrong(path, f"{reason}, and it is not ignored unless a lenient reading is requested", value)
        self.ignore(path)

    @property
    def lone_refs(self) -> bool:
        return self._lone_refs

    def reference(self, path: str, value: Any, base: str) -> str:
        """The reference of the rewritten document that leads where one of the client's leads."""
        _, part, inner = self._references.target(path, value, base)
        name = self._names.get(id(part)) if isinstance(part, dict) else None
        if name is None:
            name = f"#/$defs/{len(self._names)}_"
            self._names[id(part) if isinstance(part, dict) else -len(self._names) - 1] = name
            self._queue.append((name, path if value is None else str(value)[:200], part, inner))
        return name

    def dynamic_reference(self, path: str, keyword: str, value: Any, base: str) -> str | None:
        """The same for $dynamicRef and $recursiveRef, where they can lead to one place only."""
        if keyword == "$recursiveRef":
            unique = not self._references.recursive_anchors
        else:
            unique = isinstance(value, str) and self._references.dynamic.get(value.partition("#")[2], 0) <= 1
        if unique:
            return self.reference(path, value, base)
        self.refuse(path, f"{keyword} depends on where the output has come from", value)
        return None

    def target(self, path: str, value: Any, base: str) -> tuple[Any, str]:
        """The client's schema that a reference leads to, and its base."""
        _, part, inner = self._references.target(path, value, base)
        return part, inner

    def defer(self, fill: Callable[[], None]) -> None:
        """Call `fill` when everything has been reached, those of inner schemas first."""
        self._deferred.append(fill)

    def mark_inexact(self, schema: Schema) -> None:
        """A schema that allows more or less than it should has no opposite."""
        self._inexact.add(id(schema))

    def mark_exact(self, schema: Schema) -> None:
        self._inexact.discard(id(schema))

    def opposite(self, schema: Any) -> Schema | None:
        return self._negation.opposite(schema)

    def apart(self, a: Any, b: Any) -> bool:
        return self._comparison.apart(a, b)

    @property
    def exhausted(self) -> bool:
        return self._comparison.exhausted

    def values(self, schema: Any) -> list[Any] | None:
        return self._comparison.values(schema)

    def parts(self, schema: Any) -> list[dict[str, Any]]:
        return list(self._comparison.parts(schema))

    def add_multiple(self, path: str, value: Any) -> None:
        """Count the remainders of all multipleOf of the document together: the grammar has one automaton."""
        self._steps = common_multiple(self._steps, Decimal(repr(value)))
        if automaton_states(self._steps) > MAX_MULTIPLE:
            what = f"multipleOf, with the others of this schema, makes numbers of {automaton_states(self._steps)} remainders"
            raise wrong(path, f"{what}, at most {MAX_MULTIPLE} are counted", value)


class _Rewriting:
    """One schema on its way: `out` has the keywords that stay, `more` the schemas that hold too."""

    def __init__(self, rewriter: Rewriter, path: str, part: dict[str, Any], base: str):
        self.r, self.path, self.part, self.base = rewriter, path, part, base
        self.out: dict[str, Any] = {}
        self.more: list[Schema] = []
        self.typed = {"type": part["type"]} if "type" in part else {}  # in alternatives: fewer types to distinguish

    def result(self) -> Schema:
        alone = self.r.lone_refs and "$ref" in self.part
        check_values(self.path, {"$ref": None} if alone else self.part)
        for keyword, value in self.part.items():
            path = pointer(self.path, keyword)
            if keyword in ANNOTATIONS:
                self._annotation(path, keyword, value)
            elif keyword not in ENFORCED:
                self._unknown(path, keyword)
            elif alone and keyword != "$ref" and keyword not in ("$defs", "definitions"):
                self.r.ignore(path)
            else:
                _KEYWORDS[keyword](self, path, value)
        self._property_counts()
        if not self.more:
            return self.out
        return self.more[0] if not self.out and len(self.more) == 1 else {"allOf": [self.out, *self.more] if self.out else self.more}

    def _annotation(self, path: str, keyword: str, value: Any) -> None:
        if keyword == "$schema" and "draft-03" in str(value):
            raise wrong(path, f"$schema must name one of {', '.join(DIALECTS)}", value)
        if keyword == "$schema" and not any(dialect in str(value) for dialect in DIALECTS):
            self.r.ignore(path)

    def _unknown(self, path: str, keyword: str) -> None:
        if (likely := misspelt_keyword(keyword)) is not None:
            text = f"the keyword {keyword!r} is unknown and looks like a misspelt {likely}: write {likely}, or x-{keyword} for a note"
            raise wrong(path, text, self.part[keyword])
        self.r.ignore(path)

    def _child(self, path: str, value: Any) -> Schema:
        return self.r.schema(path, value, self.base)

    def _copy(self, path: str, value: Any) -> None:
        self.out[path.rpartition("/")[2]] = value

    def _skip(self, path: str, value: Any) -> None:
        """A keyword that another one reads."""

    def _hold(self, schema: Schema, inexact: bool = False) -> None:
        """Another schema that must hold."""
        if schema is not True:
            self.more.append(schema)
            if inexact:
                self.r.mark_inexact(schema)

    def _deferred(self, path: str, value: Any, reason: str, find: Callable[[], Schema | None], inexact: bool = False) -> None:
        """A schema that must hold and is found when everything has been reached; `reason` if there is none."""
        holder: dict[str, Any] = {}
        self._hold(holder, inexact=True)

        def fill() -> None:
            found = find()
            if found is None:
                self.r.refuse(path, reason, value)
                return
            holder.update(found if isinstance(found, dict) else {} if found else {"allOf": [False]})
            if not inexact:
                self.r.mark_exact(holder)

        self.r.defer(fill)

    # values

    def _values(self, path: str, value: Any) -> None:
        values = value if path.endswith("/enum") else [value]
        stack = list(values)
        while stack:
            one = stack.pop()
            stack += one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
            if type(one) is int and abs(one) > 2**53 and not _is_float(one):
                raise wrong(path, "an integer beyond 2^53 is not exact in the grammar: leave it out", one)
        self._copy(path, value)

    def _count(self, path: str, value: Any) -> None:
        if value < _MAX_COUNT:
            self._copy(path, int(value))
        elif "/min" in path:
            raise wrong(path, f"a count must be below {_MAX_COUNT}", value)

    def _bound(self, path: str, value: Any) -> None:
        """A bound as a floating point number that is no wider; draft 4's booleans join the bound that they are about."""
        keyword = path.rpartition("/")[2]
        lower = keyword in ("minimum", "exclusiveMinimum")
        plain, exclusive = ("minimum", "exclusiveMinimum") if lower else ("maximum", "exclusiveMaximum")
        if isinstance(value, bool):
            return
        if keyword == plain and self.part.get(exclusive) is True:
            keyword = exclusive
        rounded = _rounded(value, up=lower)
        if not math.isfinite(rounded):
            if lower == (rounded > 0):
                self._hold({"allOf": [{"type": ["null", "boolean", "string", "array", "object"]}]})
            return
        if self.part.get("type") == "integer" and abs(rounded) >= _MAX_INTEGER:
            rounded = math.copysign(_MAX_INTEGER, rounded)
        self.out[keyword] = int(rounded) if rounded == int(rounded) and abs(rounded) < 2**63 else rounded
        if rounded != value:
            self.r.mark_inexact(self.out)

    def _multiple(self, path: str, value: Any) -> None:
        self.r.add_multiple(path, value)
        self._copy(path, value)

    def _format(self, path: str, value: Any) -> None:
        if value in FORMATS:
            self._copy(path, value)
        elif value in NUMBER_FORMATS:
            low, high = NUMBER_FORMATS[value]
            self._hold({**self.typed, "minimum": max(low, -_MAX_INTEGER), "maximum": min(high, _MAX_INTEGER)})
        elif (likely := misspelt_format(value)) is not None:
            raise wrong(path, f"the format is unknown and looks like a misspelt {likely}: write {likely}", value)
        else:
            self.r.ignore(path)

    def _pattern(self, path: str, value: Any) -> None:
        try:
            first, *others = rust_patterns(value)
        except PatternError as error:
            self.r.refuse(path, f"the pattern cannot be enforced: {error}", value)
            self.r.mark_inexact(self.out)
            return
        self._copy(path, first)
        for other in others:
            self._hold({**self.typed, "pattern": other})

    # other schemas

    def _ref(self, path: str, value: Any) -> None:
        self.out["$ref"] = self.r.reference(path, value, self.base)

    def _dynamic_ref(self, path: str, value: Any) -> None:
        name = self.r.dynamic_reference(path, path.rpartition("/")[2], value, self.base)
        if name is not None:
            self._hold({"$ref": name})

    def _one_schema(self, path: str, value: Any) -> None:
        self._copy(path, self._child(path, value))

    def _list(self, path: str, value: Any) -> list[Schema]:
        return [self._child(f"{path}/{i}", one) for i, one in enumerate(value)]

    def _schemas(self, path: str, value: Any) -> None:
        self._copy(path, self._list(path, value))

    def _one_of(self, path: str, value: Any) -> None:
        options = self._list(path, value)
        if "anyOf" in self.part:
            holder: dict[str, Any] = {}
            self._hold(holder)
        else:
            holder = self.out
        holder["anyOf"] = options
        self.r.mark_inexact(holder)
        self.r.defer(lambda: self._exclude(path, value, holder, options))

    def _exclude(self, path: str, value: Any, holder: dict[str, Any], options: list[Schema]) -> None:
        """Make alternatives of anyOf exclude each other: what cannot be proven apart is written without the others."""
        common: list[list[int]] = [[] for _ in options]
        for i, j in itertools.combinations(range(len(options)), 2):
            if not self.r.apart(options[i], options[j]):
                common[i].append(j)
                common[j].append(i)
            if self.r.exhausted:
                self.r.refuse(path, f"{len(options)} alternatives are too many to be told apart", value)
                return
        if not any(common):
            self.r.mark_exact(holder)
            return
        opposites: dict[int, Schema] = {}
        for i in {j for others in common for j in others}:
            found = self.r.opposite(options[i])
            if found is None:
                first, second = sorted((i, common[i][0]))
                self.r.refuse(path, f"the alternatives {first} and {second} cannot be told apart: a value may match both", value)
                return
            opposites[i] = found
        holder["anyOf"] = [all_of([one, *(opposites[j] for j in common[i])]) for i, one in enumerate(options)]
        self.r.mark_exact(holder)

    def _not(self, path: str, value: Any) -> None:
        inner = self._child(path, value)
        self._deferred(path, value, "what this excludes has no opposite that could be enforced", lambda: self.r.opposite(inner))

    def _if(self, path: str, value: Any) -> None:
        if "then" not in self.part and "else" not in self.part:
            return
        condition = self._child(path, value)
        then, otherwise = (self._child(pointer(self.path, word), self.part.get(word, True)) for word in ("then", "else"))

        def find() -> Schema | None:
            opposite = self.r.opposite(condition)
            if opposite is None:
                return None
            return any_of([all_of([condition, then]), all_of([opposite, otherwise])])

        self._deferred(path, value, "the condition has no opposite that could be enforced", find)

    def _then_or_else(self, path: str, value: Any) -> None:
        if "if" not in self.part:
            self.r.ignore(path)

    # objects

    def _by_name(self, path: str, value: Any) -> dict[str, Schema]:
        return {name: self._child(pointer(path, name), one) for name, one in value.items()}

    def _properties(self, path: str, value: Any) -> None:
        properties = self._by_name(path, value)
        required = set(self._required())
        optional = sum(name not in required and one is not False for name, one in properties.items())
        if optional > MAX_OPTIONAL:
            raise wrong(path, f"at most {MAX_OPTIONAL} properties may be optional", f"{optional} of {len(properties)}")
        self._copy(path, properties)

    def _required(self) -> list[str]:
        names = self.part.get("required")
        return list(dict.fromkeys(name for name in names if isinstance(name, str))) if isinstance(names, list) else []

    def _pattern_properties(self, path: str, value: Any) -> None:
        translated: dict[str, Schema] = {}
        for name, one in self._by_name(path, value).items():
            try:
                pattern = rust_pattern(name)
            except PatternError as error:
                self.r.refuse(pointer(path, name), f"the pattern cannot be enforced: {error}", name)
                self.r.mark_inexact(self.out)
                continue
            translated[pattern] = one
        self._copy(path, translated)

    def _property_names(self, path: str, value: Any) -> None:
        inner = self._child(path, value)
        reason = "names can be bounded by enum, const, pattern, minLength and maxLength, one of them at a time"
        self._deferred(path, value, reason, lambda: self._with_names(inner))

    def _with_names(self, inner: Schema) -> Schema | None:
        """An object whose names all satisfy a schema."""
        if inner is False:
            return {"maxProperties": 0}
        if (values := self.r.values(inner)) is not None:
            return {"properties": {name: True for name in values if isinstance(name, str)}, "additionalProperties": False}
        found: list[Schema] = []
        for part in self.r.parts(inner):
            keys = set(part) - {"allOf", "$ref"}
            if keys - {"type", "pattern", "minLength", "maxLength"} or "string" not in str(part.get("type", "string")):
                return None
            if "pattern" in keys:
                found.append({"patternProperties": {part["pattern"]: True}, "additionalProperties": False})
            if keys & {"minLength", "maxLength"}:
                length = f"^(?s:.){{{part.get('minLength', 0)},{part.get('maxLength', '')}}}$"
                found.append({"patternProperties": {length: True}, "additionalProperties": False})
        return all_of(found) if len(found) < 2 else None

    def _dependent_required(self, path: str, value: Any) -> None:
        for name, names in value.items():
            check_value(pointer(path, name), "required", names)
            self._depend(name, {"required": list(dict.fromkeys([name, *names]))})

    def _dependent_schemas(self, path: str, value: Any) -> None:
        for name, one in value.items():
            self._depend(name, all_of([{"required": [name]}, self._child(pointer(path, name), one)]))

    def _dependencies(self, path: str, value: Any) -> None:
        for name, one in value.items():
            if isinstance(one, list):
                self._dependent_required(path, {name: one})
            else:
                self._dependent_schemas(path, {name: one})

    def _depend(self, name: str, consequence: Schema) -> None:
        """Either no property of this name, or what follows from it."""
        if name in self._required():
            self._hold(consequence)
        else:
            self._hold(any_of([{**self.typed, "properties": {name: False}}, all_of([self.typed, consequence])]))

    def _property_counts(self) -> None:
        """minProperties and maxProperties, which the grammar counts only where every named property is required."""
        low, high = self.out.pop("minProperties", 0), self.out.pop("maxProperties", None)
        required = self._required()
        properties = self.out.get("properties", {})
        optional = [name for name, one in properties.items() if name not in required and one is not False]
        open_ended = self.out.get("additionalProperties", True) is not False or bool(self.out.get("patternProperties"))
        if high is not None and not open_ended and len(optional) + len(required) <= high:
            high = None
        low = 0 if low <= len(required) else low
        if not low and high is None:
            return
        path = pointer(self.path, "minProperties" if low else "maxProperties")
        value = self.part[path.rpartition("/")[2]]
        more = self._counted(low, high, required, optional, open_ended)
        if more is None:
            self.r.refuse(path, f"this needs more than {MAX_ALTERNATIVES} choices of properties, or names that might repeat", value)
            self.r.mark_inexact(self.out)
        else:
            self._hold(more)

    def _counted(self, low: int, high: int | None, required: list[str], optional: list[str], open_ended: bool) -> Schema | None:
        """Alternatives by the optional properties that are there; None if they are too many, or need several names that might repeat."""
        free_low, free_high = max(0, low - len(required)), None if high is None else high - len(required)
        if free_high is not None and free_high < 0:
            return False
        if not optional:
            counts = {"minProperties": low} | ({} if high is None else {"maxProperties": high})
            return {**self.typed, **counts} if free_low <= 1 else None
        if high is None and free_low == 1:
            options: list[Schema] = [{**self.typed, "required": [name]} for name in optional]
            if open_ended:
                options.append({**self.typed, "properties": dict.fromkeys(optional, False), "minProperties": low})
            return any_of(options) if len(options) <= 2 * MAX_ALTERNATIVES else None
        sizes = range(len(optional) + 1) if free_high is None else range(min(free_high, len(optional)) + 1)
        if not open_ended:  # subsets of the greatest size, each with what must be there
            sizes = range(free_low, free_low + 1) if free_high is None else sizes
        if sum(math.comb(len(optional), size) for size in sizes) > MAX_ALTERNATIVES:
            return None
        return any_of([self._chosen(set(chosen), optional, low, high, open_ended, free_low) for n in sizes
                       for chosen in itertools.combinations(optional, n)])  # fmt: skip

    def _chosen(self, chosen: set[str], optional: list[str], low: int, high: int | None, open_ended: bool, free_low: int) -> Schema:
        """An object with exactly these optional properties (with at least these, if only a minimum is to be kept)."""
        if len(chosen) < free_low - (1 if open_ended else 0):
            return False
        schema: dict[str, Any] = {**self.typed, "required": sorted(chosen, key=optional.index)}
        if high is not None or open_ended:
            schema["properties"] = {name: False for name in optional if name not in chosen}
        if open_ended:
            schema |= {"minProperties": low} if len(chosen) < free_low else {}
            schema |= {} if high is None else {"maxProperties": high}
        return schema

    def _unevaluated_properties(self, path: str, value: Any) -> None:
        inner = self._child(path, value)
        found: dict[str, dict[str, Schema]] | None = {"properties": {}, "patternProperties": {}}
        assert found is not None
        evaluated = self._evaluated(self.path, self.part, self.base, found, 0)
        if inner is True or evaluated is True:
            return
        if evaluated is None:
            self.r.refuse(path, "which properties are evaluated depends on the output", value)
            return
        self._hold({**self.typed, **{k: v for k, v in found.items() if v}, "additionalProperties": inner})

    def _evaluated(self, path: str, part: Any, base: str, found: dict[str, dict[str, Schema]], depth: int) -> bool | None:
        """Collect the names that `part` evaluates. True: all of them; None: it depends."""
        if not isinstance(part, dict):
            return False
        check_values(path, part)
        if depth > 16 or any(keyword in part for keyword in _CONDITIONAL):
            return None
        if "additionalProperties" in part or (depth and "unevaluatedProperties" in part):
            return True
        for name in part.get("properties", ()):
            found["properties"][name] = True
        for name in part.get("patternProperties", ()):
            try:
                found["patternProperties"][rust_pattern(name)] = True
            except PatternError:
                return None
        inner = [(one, base) for one in part.get("allOf", ())]
        if "$ref" in part:
            inner.append(self.r.target(path, part["$ref"], base))
        results = [self._evaluated(path, one, one_base, found, depth + 1) for one, one_base in inner]
        return None if None in results else any(results)

    # lists

    def _items(self, path: str, value: Any) -> None:
        if isinstance(value, list):
            if "prefixItems" in self.part:
                raise wrong(path, "a list of items cannot be next to prefixItems", value)
            self.out["prefixItems"] = self._list(path, value)
            if "additionalItems" in self.part:
                self.out["items"] = self._child(pointer(self.path, "additionalItems"), self.part["additionalItems"])
        else:
            self._copy(path, self._child(path, value))

    def _unevaluated_items(self, path: str, value: Any) -> None:
        if any(keyword in self.part for keyword in (*_CONDITIONAL, "allOf", "$ref", "contains")):
            self.r.refuse(path, "which items are evaluated depends on other keywords", value)
        elif "items" not in self.part or (isinstance(self.part["items"], list) and "additionalItems" not in self.part):
            self.out["items"] = self._child(path, value)

    def _contains(self, path: str, value: Any) -> None:
        inner = self._child(path, value)
        low, high = int(self.part.get("minContains", 1)), self.part.get("maxContains")
        if inner is True or inner == {}:
            self._hold({**self.typed, "minItems": low} | ({} if high is None else {"maxItems": int(high)}))
        elif low > _MAX_CONTAINED:
            self.r.refuse(path, f"minContains above {_MAX_CONTAINED} is not supported", low)
        elif high is not None:
            reason = "what maxContains counts has no opposite that could be enforced"
            self._deferred(path, value, reason, lambda: self._contained(inner, low, int(high)), inexact=True)
        elif low:
            self._hold({**self.typed, "prefixItems": [inner] * low, "minItems": low}, inexact=True)

    def _contained(self, inner: Schema, low: int, high: int) -> Schema | None:
        opposite = self.r.opposite(inner)
        if opposite is None:
            return None
        return {**self.typed, "prefixItems": [inner] * low, "minItems": low, "items": opposite} if low <= high else False

    def _unique_items(self, path: str, value: Any) -> None:
        if value and self.part.get("maxItems", 2) > 1:
            reason = f"unique items are supported where `items` has an enum of at most {_MAX_UNIQUE} values"
            self._deferred(path, value, reason, self._orders, inexact=True)

    def _orders(self) -> Schema | None:
        """The orders of unique values, or only that of the enum if they are too many."""
        out = self.out
        values = self.r.values(out["items"]) if "items" in out and not out.get("prefixItems") else None
        if values is None and "items" in out and not out.get("prefixItems") and out["items"] == {"type": "boolean"}:
            values = [False, True]
        if values is None:
            return None
        unique: list[Any] = []
        for one in values:
            if len(unique) > _MAX_UNIQUE:
                return None
            unique += [] if any(equal(one, other) for other in unique) else [one]
        low, high = out.get("minItems", 0), min(out.get("maxItems", len(unique)), len(unique))
        orders = sum(math.perm(len(unique), k) for k in range(low, high + 1))
        choose: Any = itertools.permutations if orders <= MAX_ALTERNATIVES + 1 else itertools.combinations
        if len(unique) > _MAX_UNIQUE:
            return None
        return any_of([
            {**self.typed, "prefixItems": [{"const": one} for one in chosen], "minItems": k, "maxItems": k}
            for k in range(low, high + 1)
            for chosen in choose(unique, k)
        ])  # fmt: skip


def _is_float(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _rounded(value: float, up: bool) -> float:
    """The nearest floating point number that is not below (not above) a number."""
    try:
        rounded = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    if isinstance(value, float) or int(rounded) == value:
        return value
    return math.nextafter(rounded, math.inf if up else -math.inf) if (int(rounded) < value) == up else rounded


_KEYWORDS: dict[str, Callable[[_Rewriting, str, Any], None]] = {
    **dict.fromkeys(ENFORCED, _Rewriting._copy),
    **dict.fromkeys(("enum", "const"), _Rewriting._values),
    **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"), _Rewriting._count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Rewriting._bound),
    **dict.fromkeys(("$defs", "definitions", "additionalItems", "minContains", "maxContains"), _Rewriting._skip),
    **dict.fromkeys(("then", "else"), _Rewriting._then_or_else),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), _Rewriting._dynamic_ref),
    **dict.fromkeys(("allOf", "anyOf", "prefixItems"), _Rewriting._schemas),
    "multipleOf": _Rewriting._multiple,
    "format": _Rewriting._format,
    "pattern": _Rewriting._pattern,
    "$ref": _Rewriting._ref,
    "oneOf": _Rewriting._one_of,
    "not": _Rewriting._not,
    "if": _Rewriting._if,
    "properties": _Rewriting._properties,
    "patternProperties": _Rewriting._pattern_properties,
    "additionalProperties": _Rewriting._one_schema,
    "propertyNames": _Rewriting._property_names,
    "dependentRequired": _Rewriting._dependent_required,
    "dependentSchemas": _Rewriting._dependent_schemas,
    "dependencies": _Rewriting._dependencies,
    "unevaluatedProperties": _Rewriting._unevaluated_properties,
    "items": _Rewriting._items,
    "unevaluatedItems": _Rewriting._unevaluated_items,
    "contains": _Rewriting._contains,
    "uniqueItems": _Rewriting._unique_items,
}
