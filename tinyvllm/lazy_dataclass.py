"""`dataclass` as the standard library has it, but that each method is made when it is first called.

The standard library compiles every method of a class where the class is defined: 0.25 ms, 0.5 ms if it is frozen, which for 200 classes was
a fifth of a warm start. A third of the classes are ever instantiated, and nearly none is compared, hashed or printed. Here a class costs
0.04 ms, and a method is made at its first call; then the class has it as before, and a step is not slower.

What differs: the signature of a class shows after its first instance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING
from dataclasses import dataclass as standard_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

_OPTIONS: dict[str, dict[str, bool]] = {  # with which the standard library makes a method
    "__repr__": {"repr": True, "eq": False},
    "__eq__": {"repr": False, "eq": True},
    "__hash__": {"repr": False, "eq": True, "unsafe_hash": True},
}
_ABSENT = object()  # the argument of a field with a factory that is not given

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, eq: bool = True, frozen: bool = False, kw_only: bool = False, slots: bool = False, **others: bool
    ) -> Any:
        """The class as a dataclass. With an option that is not named here the standard library makes it at once."""
        if cls is None:
            return partial(dataclass, eq=eq, frozen=frozen, kw_only=kw_only, slots=slots, **others)
        if others:
            return standard_dataclass(cls, eq=eq, frozen=frozen, kw_only=kw_only, slots=slots, **others)
        cls.__doc__ = cls.__doc__ or cls.__name__  # the standard library would write its signature there, for which it has to be made
        own_hash = vars(cls).get("__hash__")  # None, too, where the class compares in its own way
        cls = _with_fields(cls, frozen, kw_only, slots)
        _make_later(cls, "__init__", partial(_init, cls, frozen))
        for name in ("__repr__", "__eq__") if eq else ("__repr__",):
            _make_later(cls, name, partial(_standard, cls, name))
        if eq and frozen and own_hash is None:
            cls.__hash__ = _later(cls, "__hash__", partial(_standard, cls, "__hash__"))
        elif eq and own_hash is None:
            cls.__hash__ = None
        if frozen:
            _freeze(cls)
        return cls


def _with_fields(cls: Any, frozen: bool, kw_only: bool, slots: bool) -> Any:
    """The class with the standard library's fields; another one if it has slots.

    A frozen class gets its methods from `_freeze`, so that the standard library must not see that it is frozen, nor that its bases are.
    """
    bases = [params for base in cls.__mro__[1:] if (params := vars(base).get("__dataclass_params__")) is not None]
    if any(params.frozen != frozen for params in bases):
        kinds = ("non-frozen", "frozen") if frozen else ("frozen", "non-frozen")
        raise TypeError(f"cannot inherit {kinds[1]} dataclass from a {kinds[0]} one")
    try:
        for params in bases:
            params.frozen = False
        cls = standard_dataclass(cls, init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)
    finally:
        for params in bases:
            params.frozen = frozen
    cls.__dataclass_params__.frozen = frozen
    return cls


def _make_later(cls: type, name: str, make: Callable[[], Callable[..., Any]]) -> None:
    """Make a method, which the class does not define itself, when it is first called."""
    if name not in vars(cls):
        setattr(cls, name, _later(cls, name, make))


def _later(cls: type, name: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        made = make()
        made.__qualname__ = method.__qualname__
        setattr(cls, name, made)
        return made(self, *arguments, **named)

    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return method


def _standard(cls: Any, name: str) -> Callable[..., Any]:
    """The method as the standard library makes it, for another class with the same fields."""
    fields = [(field.name, field.type, field) for field in dataclasses.fields(cls)]
    options: dict[str, Any] = {"namespace": {"__doc__": cls.__doc__}, "init": False, **_OPTIONS[name]}
    made: Callable[..., Any] = vars(dataclasses.make_dataclass(cls.__name__, fields, **options))[name]
    return made


def _init(cls: Any, frozen: bool) -> Callable[..., Any]:
    """`__init__`: for a frozen class the standard library would compile two other methods with it, 0.3 ms for each class that is used."""
    values: dict[str, Any] = {"_lazy_absent": _ABSENT, "_lazy_set": object.__setattr__}
    positional, named, body = ["self"], list[str](), list[str]()
    for field in dataclasses.fields(cls):
        name, held, has_factory = field.name, f"_lazy_{field.name}", field.default_factory is not MISSING
        values[held], value = field.default_factory if has_factory else field.default, name
        if field.init:
            default = "=_lazy_absent" if has_factory else "" if field.default is MISSING else f"={held}"
            (named if field.kw_only else positional).append(name + default)
        elif not has_factory:  # not set here, or the default that the class has
            continue
        if has_factory:
            value = f"{held}() if {name} is _lazy_absent else {name}" if field.init else f"{held}()"
        body.append(f"_lazy_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join([*positional, *(["*", *named] if named else [])])
    exec(f"def __init__({arguments}):\n " + "\n ".join(body or ["pass"]), values)
    made: Callable[..., Any] = values["__init__"]
    return made


def _freeze(cls: Any) -> None:
    """Refuse to set and to delete fields, and anything of an instance of this very class."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = __setattr__, __delattr__
    if "__slots__" in vars(cls):  # there is no dict for pickle to fill
        cls.__getstate__, cls.__setstate__ = _values, _set_values


def _values(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_values(self: Any, values: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), values, strict=True):
        object.__setattr__(self, field.name, value)
