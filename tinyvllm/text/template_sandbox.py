"""The environment of chat templates: jinja2's immutable sandbox, in which every operation is at the expense of a Budget.

What jinja2 itself compiles to plain Python (concatenation, literals, slices, loops, constant output) goes through `environment` here;
filters, calls and operators are wrapped. Operations whose result could be far larger than their arguments are checked before they run.
Nothing is evaluated while a template is compiled.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import datetime
from types import BuiltinMethodType, GeneratorType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tinyvllm.text.template_budget import MAX_BITS, MAX_PARTS, MAX_REPEATED, MAX_WEIGHT, Budget, LimitError, RefusalError, current

_SHORT = 10_000  # characters: for filters whose time grows with the square
_MAX_INDENT = 16  # of tojson
_MAX_DIGITS = 6  # of a width in a format
_LONG_NUMBER = re.compile(rf"\d{{{_MAX_DIGITS + 1}}}|\*")


class _Counted:
    """What a loop runs over: each item is a step. It has a length if the values have one."""

    def __init__(self, values: Iterable[Any], budget: Budget):
        self._values, self._budget = values, budget

    def __iter__(self) -> Iterator[Any]:
        return self._budget.counted(self._values)


class _CountedSized(_Counted):
    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # only made of values that have a length


class _Generator(CodeGenerator):
    """Compiles what makes values or repeats itself into calls of the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("), context.eval_ctx.autoescape)")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":  # the targets of an assignment
            return super().visit_Tuple(node, frame)
        self.write("environment.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        each = nodes.EnvironmentAttribute("each", lineno=node.lineno)
        node.iter = nodes.Call(each, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        constant = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if constant and frame.buffer is not None:  # text at the top level is counted where it comes out
            self.writeline(f"environment.spend({constant})")
        super().visit_Output(node, frame)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one template, whose renderings may run in several threads: all state is in their budgets."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
            optimized=False,  # an operation must not run while the template is compiled
            finalize=_finalize,  # takes the context, so that constant output is not evaluated then, either
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {"namespace": _Namespace, "raise_exception": _raise_refusal, "strftime_now": _strftime_now}

    def made(self, value: Any) -> Any:
        return current().made(value)

    def each(self, values: Any) -> Any:
        """What a loop runs over."""
        if not isinstance(values, Iterator):
            iter(values)  # raises jinja2's own errors for what cannot be looped over
        return (_CountedSized if isinstance(values, Sized) else _Counted)(values, current())

    def spend(self, characters: int) -> None:
        budget = current()
        budget.step()
        budget.spend_output(characters)

    def joined(self, values: Sequence[Any], autoescape: bool) -> str:
        """The operator `~`."""
        budget = current()
        _check_size(budget.weigh_each(values))
        text: str = markup_join(values) if autoescape else "".join(map(str, values))
        budget.made(text)
        return text

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]  # an attribute of the base class
        """The output of a macro or of a block, which the template may use again."""
        parts = list(parts)
        _check_size(sum(map(len, parts)))
        return str(current().made("".join(parts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        if operator == "*":
            _check_repeat(left, right)
        elif operator == "**" and not (abs(left) <= 2**64 and abs(right) <= 64):
            raise SecurityError(f"{left!r:.20} ** {right!r:.20} is too large for a template")
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_percent(budget, left, right)
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            _check_size(budget.weigh(left) + budget.weigh(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902 - as in the base class
        budget = current()
        budget.step()
        target = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType) and isinstance(target, (str, bytes, list, tuple, dict, int, float)):
            _check_method(budget, target, __obj.__name__, args, kwargs)
        elif getattr(__obj, "__name__", "") in ("format", "format_map") and isinstance(_format_target(__obj), str):
            _check_format(budget, _format_target(__obj), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return result if isinstance(target, dict) and __obj.__name__ == "get" else budget.made(result)  # nothing new


def _format_target(function: Any) -> Any:
    """The text of a `format` that jinja2's sandbox has wrapped."""
    return getattr(getattr(function, "__wrapped__", None), "__self__", None)


# --- what is checked before it runs


def _check_size(weight: int) -> None:
    if weight > MAX_WEIGHT:
        raise LimitError(f"a text or list would have {weight} characters, more than {MAX_WEIGHT}")


def _check_width(value: object) -> None:
    if not isinstance(value, int) or abs(value) > MAX_REPEATED:
        raise LimitError(f"a width or count of {str(value)[:20]} exceeds the limit of {MAX_REPEATED} for a template")


def _check_repeat(left: Any, right: Any) -> None:
    sized, times = (left, right) if isinstance(left, Sized) else (right, left)
    if isinstance(sized, Sized) and isinstance(times, int) and max(len(sized), current().weigh(sized)) * times > MAX_REPEATED:
        raise SecurityError(f"{len(sized)} times {str(times)[:20]} exceeds the limit of {MAX_REPEATED} for a template")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise LimitError(f"an integer would have more than {MAX_BITS} bits")


def _check_percent(budget: Budget, text: str | bytes, values: Any) -> None:
    """text % values: widths are written in the text, and each value may be used once for each sign."""
    if isinstance(text, bytes) or _LONG_NUMBER.search(text):
        raise LimitError(f"a width in a format has more than {_MAX_DIGITS} digits, or comes from a value")
    values = values if isinstance(values, tuple) else tuple(values.values()) if isinstance(values, dict) else (values,)
    _check_size(len(text) + max(1, text.count("%")) * _widest(budget, text, values))


def _check_format(budget: Budget, text: str, args: Sequence[Any], kwargs: Any) -> None:
    """text.format(...): the same, with fields in braces, whose widths may be fields again."""
    fields = list(string.Formatter().parse(text))
    if _LONG_NUMBER.search(text) or any(spec and "{" in spec for _, _, spec, _ in fields):
        raise LimitError(f"a width in a format has more than {_MAX_DIGITS} digits, or comes from a value")
    _check_size(len(text) + len(fields) * _widest(budget, text, (*args, *kwargs.values())))


def _widest(budget: Budget, text: str, values: tuple[Any, ...]) -> int:
    """The most characters that one field can take: of a value, or a width in the text."""
    return max(budget.weigh_each(values), *(int(digits) for digits in re.findall(r"\d+", text)), 1)


def _check_replace(text: str, old: object, new: object) -> None:
    """text.replace(old, new): the exact length of its result."""
    if not isinstance(old, str) or not isinstance(new, str):
        return
    count = text.count(old)
    _check_size(len(text) + count * (len(new) - len(old)))


def _check_parts(text: str, separator: object) -> None:
    """text.split(separator)"""
    count = text.count(separator) if isinstance(separator, str) and separator else sum(map(text.count, " \t\n\r\v\f"))
    if count > MAX_PARTS:
        raise LimitError(f"a text would be split into {count} parts, more than {MAX_PARTS}")


# Methods of built-in types that a template may call; of texts those that are marked take more than their argument's size.
_TEXT_METHODS = frozenset(
    ("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
     "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "lstrip", "partition",
     "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith", "strip", "swapcase", "title", "upper")
)  # fmt: skip
_WIDE_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
_SPLIT_METHODS = frozenset(("split", "rsplit", "splitlines"))
_OTHER_METHODS = {
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values", "fromkeys")),
    int: frozenset(("bit_length", "bit_count", "conjugate", "is_integer")),
    float: frozenset(("is_integer", "conjugate", "hex")),
}


def _check_method(budget: Budget, target: Any, name: str, args: Sequence[Any], kwargs: Any) -> None:
    if not isinstance(target, str):
        allowed = next((names for kind, names in _OTHER_METHODS.items() if isinstance(target, kind)), frozenset())
        if name not in allowed:
            raise SecurityError(f"{type(target).__name__}.{name} is unsafe in a template")
        return
    first = args[0] if args else next(iter(kwargs.values()), None)
    if name in _WIDE_METHODS:
        width = 8 if first is None else first
        _check_width(width)
        if name == "expandtabs":
            _check_size(len(target) + target.count("\t") * width)
    elif name in _SPLIT_METHODS:
        _check_parts(target, kwargs.get("sep", first) if name != "splitlines" else None)
    elif name == "join":
        if isinstance(first, Iterator):
            raise SecurityError("str.join of a generator is unsafe in a template: put `| list` after it")
        _check_size(budget.weigh(first) + len(target) * len(first if isinstance(first, Sized) else ()))
    elif name == "replace":
        _check_replace(target, first, args[1] if len(args) > 1 else None)
    elif name not in _TEXT_METHODS:
        raise SecurityError(f"str.{name} is unsafe in a template")


# --- filters


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments, takes generators as lists where it uses all of them at once, and weighs its result."""
    check, skipped = _FILTER_CHECKS.get(name), 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        before, value, rest = args[:skipped], args[skipped] if len(args) > skipped else "", args[skipped + 1 :]
        if isinstance(value, (GeneratorType, map, filter)) and name not in _LAZY_FILTERS:
            value = budget.made(list(budget.counted(value)))
        if check is not None:
            check(budget, value, *rest, **kwargs)
        result = function(*before, value, *rest, **kwargs)
        if isinstance(result, (GeneratorType, map, filter)):
            return budget.counted(result)
        return result if name in _NOTHING_NEW else budget.made(result)

    return bounded


_NOTHING_NEW = frozenset(("first", "last", "default", "d", "length", "count", "safe", "items"))
_LAZY_FILTERS = frozenset(("map", "select", "reject", "selectattr", "rejectattr", "first"))


def _check_short(budget: Budget, value: Any, *rest: Any, **more: Any) -> None:
    weight = budget.weigh(value) + budget.weigh_each((*rest, *more.values()))
    if weight > _SHORT:
        raise LimitError(f"a filter takes at most {_SHORT} characters, got {weight}")


def _check_weight(budget: Budget, value: Any, *rest: Any, **more: Any) -> None:
    _check_size(budget.weigh(value) + budget.weigh_each((*rest, *more.values())))


def _check_center(budget: Budget, value: Any, width: Any = 80) -> None:
    _check_width(width)


def _check_indent(budget: Budget, value: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    size = len(width) if isinstance(width, str) else width
    _check_width(size)
    _check_size(budget.weigh(value) + (str(value).count("\n") + 1) * size)


def _check_count(budget: Budget, value: Any, count: Any = 1, fill_with: Any = None) -> None:
    """batch and slice: `count` is the length of each list, or their number."""
    if isinstance(count, int):
        budget.step(min(abs(count), MAX_REPEATED + 1))
        _check_width(count)
        _check_size(abs(count) * (8 + budget.weigh(fill_with)))


def _check_filter_replace(budget: Budget, value: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    _check_weight(budget, value, old, new)
    _check_replace(str(value), old, new)


def _check_join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    count = len(value) if isinstance(value, Sized) else 0
    _check_size(budget.weigh(value) + count * budget.weigh(d))


def _check_filter_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(budget, str(value), kwargs or args)


def _check_round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    if not isinstance(precision, int) or abs(precision) > 20:
        raise LimitError(f"round: the precision must be at most 20, got {str(precision)[:20]}")


def _check_sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):
        _check_short(budget, value, start)  # lists: each step copies all before it


def _check_list(budget: Budget, value: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_PARTS:
        raise LimitError(f"a text of {len(value)} characters would be made a list, at most {MAX_PARTS} are")


def _check_json(
    budget: Budget, value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> None:
    budget.weigh(value)
    size = len(indent) if isinstance(indent, str) else 0 if indent is None else indent
    if not isinstance(size, int) or size > _MAX_INDENT or (separators is not None and sum(map(len, separators)) > _MAX_INDENT):
        raise LimitError(f"tojson: indent and separators must be at most {_MAX_INDENT} characters")


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("urlize", "striptags", "pprint", "wordwrap", "xmlattr", "wordcount"), _check_short),
    **dict.fromkeys(
        ("sort", "unique", "groupby", "dictsort", "min", "max", "string", "escape", "e", "forceescape", "title"), _check_weight
    ),
    "center": _check_center,
    "indent": _check_indent,
    "batch": _check_count,
    "slice": _check_count,
    "replace": _check_filter_replace,
    "join": _check_join,
    "format": _check_filter_format,
    "round": _check_round,
    "sum": _check_sum,
    "list": _check_list,
    "tojson": _check_json,
    "truncate": _check_weight,
}


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """A value on its way to the output, which has room for it."""
    budget = current()
    budget.step()
    budget.weigh(value)
    return value


# --- globals, and the tag {% generation %}


class _Namespace(Namespace):
    """Its text does not hold its values, which could hold one another."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks assistant text for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_refusal(text: object) -> NoReturn:
    raise RefusalError(str(text))


def _strftime_now(pattern: str) -> str:
    if not isinstance(pattern, str) or len(pattern) > 100 or _LONG_NUMBER.search(pattern) or re.search(r"\d{3}", pattern):
        raise LimitError("strftime_now: the format must be a text of at most 100 characters without wide fields")
    return datetime.now().strftime(pattern)
