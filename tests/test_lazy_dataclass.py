"""tinyvllm/lazy_dataclass.py: classes behave as the standard library's, and their methods are made when they are first called."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from tinyvllm.lazy_dataclass import dataclass

MADE: list[Callable[..., Any]] = [dataclasses.dataclass, dataclass]


def kinds(decorator: Callable[..., Any]) -> list[Any]:
    """Classes of the kinds that the project has."""

    @decorator
    class Plain:
        number: int
        names: list[str] = field(default_factory=list)
        hidden: int = field(default=3, repr=False, compare=False)
        kind: ClassVar[str] = "plain"

    @decorator(frozen=True)
    class Frozen:
        number: int
        names: tuple[str, ...] = ()
        total: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.number + 1)

    @decorator(frozen=True)
    class Derived(Frozen):
        more: float = 0.5

        def __repr__(self) -> str:
            return f"Derived of {self.number}"

    @decorator(frozen=True, eq=False)
    class Single:
        number: int

    @decorator(frozen=True, kw_only=True)
    class Named:
        number: int

        def __hash__(self) -> int:
            return 5

    return [Plain, Frozen, Derived, Single, Named]


@pytest.mark.parametrize("index", range(5), ids=["plain", "frozen", "derived", "single", "named"])
def test_a_class_is_as_the_standard_library_makes_it(index: int) -> None:
    known, lazy = (kinds(decorator)[index] for decorator in MADE)

    def of(cls: Any) -> list[object]:
        one, same, other = cls(number=1), cls(number=1), cls(number=2)
        said = [repr(one), one == same, one == other, one == 1, one != same, dataclasses.asdict(other), str(cls.__match_args__)]
        said += [dataclasses.replace(one, number=2) == other, [f.name for f in dataclasses.fields(cls)], vars(one)]
        said.append(cls.__hash__ is None or [hash(one) == hash(same), hash(one) == hash(other)])
        for call in (
            lambda: setattr(one, "number", 7),
            lambda: delattr(one, "number"),
            cls,
            lambda: cls(1, 2, 3, 4, 5),
            lambda: cls(numbr=1),
        ):
            try:
                said.append(str(call()))
            except (dataclasses.FrozenInstanceError, TypeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    shared = [f"{cls.__module__}.{cls.__qualname__}" for cls in (known, lazy)]
    assert shared[0] == shared[1] and of(lazy) == of(known)


def test_methods_are_made_at_their_first_call() -> None:
    frozen, derived = kinds(dataclass)[1:3]

    def made(cls: Any) -> list[str]:
        methods = {name: vars(cls)[name] for name in ("__init__", "__eq__", "__hash__")}
        return [name for name, method in methods.items() if not method.__code__.co_filename.endswith("lazy_dataclass.py")]

    assert made(frozen) == made(derived) == []
    first = derived(1)
    assert made(derived) == ["__init__"] and first == derived(1)
    assert made(derived) == ["__init__", "__eq__"] and hash(first) == hash(derived(1))
    assert made(derived) == ["__init__", "__eq__", "__hash__"] and made(frozen) == []


@dataclass(frozen=True)
class Kept:
    """Of a module, so that it can be pickled."""

    number: int


def test_instances_are_pickled_before_and_after_a_method_is_made() -> None:
    assert pickle.loads(pickle.dumps(Kept(3))) == Kept(3)


@dataclass(frozen=True, slots=True)
class Slotted:
    """Of a module, so that it can be pickled."""

    number: int
    names: tuple[str, ...] = ()


def test_a_class_with_slots_has_its_methods_made_later_too() -> None:
    assert Slotted.__init__.__code__.co_filename.endswith("lazy_dataclass.py")
    one = Slotted(1, ("a",))
    assert not hasattr(one, "__dict__") and one == Slotted(1, ("a",)) and hash(one) == hash(Slotted(1, ("a",)))
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.number = 2  # type: ignore[misc]


@pytest.mark.parametrize("above", MADE, ids=["known", "lazy"])
@pytest.mark.parametrize("below", MADE, ids=["known", "lazy"])
def test_classes_of_both_kinds_derive_from_each_other(above: Callable[..., Any], below: Callable[..., Any]) -> None:
    @above(frozen=True)
    class Base:
        number: int

    @below(frozen=True)
    class Derived(Base):
        more: int = 5

    one = Derived(1)
    assert (one, hash(one)) == (Derived(1, 5), hash(Derived(1, 5))) and repr(one).endswith("Derived(number=1, more=5)")
    for name in ("number", "more", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, name, 2)
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        below(type("Thawed", (Base,), {}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Base(1).number = 2


def test_an_option_of_the_standard_library_makes_the_class_at_once() -> None:
    @dataclass(order=True)
    class Ordered:
        number: int

    assert sorted([Ordered(2), Ordered(1)]) == [Ordered(1), Ordered(2)]
