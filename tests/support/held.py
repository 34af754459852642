"""Counts all that the objects of lmkv in this process hold: lengths, numbers, locks, waiting futures and tasks.

Nothing is listed by hand: whatever can be reached from the roots and from the modules of lmkv is counted by class and
attribute, so that a new counter is compared as soon as it exists.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import sys
import types
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

_SIZED = (dict, list, set, frozenset, deque, WeakSet, WeakKeyDictionary, WeakValueDictionary)
_WALKED = ("lmkv.", "lmkv_server.", "lmkv_client.", "contextlib.")
_VALUES = ("lmkv.errors.", "lmkv.config.", "lmkv.spec.", "lmkv.v1.", "lmkv.internal.")


def held(*roots: object) -> Counter[str]:
    """What is held: numbers and locks by `Class.attribute`, lengths by `len Class.attribute`, instances by `Class()`,
    and tasks by their coroutines."""
    counts: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        name = getattr(task.get_coro(), "__qualname__", task.get_name())
        if not name.startswith("_AioCall."):  # of gRPC's clients, which tests interrupt themselves
            counts[f"task {name}"] += 1
    pending: list[Any] = [*roots, *_globals()]
    seen: dict[int, object] = {}
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if _is_walked(type(one)):
            name = type(one).__qualname__
            counts[f"{name}()"] += 1
            for attribute, value in _attributes(one):
                if isinstance(value, _SIZED):
                    counts[f"len {name}.{attribute}"] += len(value)
                elif (amount := _amount(value)) is not None:
                    counts[f"{name}.{attribute}"] += amount
                    continue
                pending.append(value)
        pending += _inside(one)
    return counts


@functools.cache
def _globals() -> tuple[object, ...]:
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(_WALKED)]
    values = [value for module in modules for value in vars(module).values()]
    return tuple(value for value in values if _is_walked(type(value)) or type(value) in _SIZED)


def _is_walked(kind: type) -> bool:
    module = f"{kind.__module__}."
    return module.startswith(_WALKED) and not module.startswith(_VALUES) and not issubclass(kind, enum.Enum)


def _slots(kind: type) -> tuple[str, ...]:
    found = (each.__dict__.get("__slots__", ()) for each in kind.__mro__)
    names = (name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for name in _slots(type(one)):
        if hasattr(one, name):
            yield name, getattr(one, name)


def _amount(value: Any) -> int | None:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, asyncio.Lock):
        return value.locked()
    if isinstance(value, asyncio.Semaphore):
        return -value._value
    if isinstance(value, asyncio.Event):
        return len(value._waiters)
    if isinstance(value, asyncio.Queue):
        return value.qsize()
    if isinstance(value, asyncio.Future):
        return not value.done()
    return None


def _inside(one: Any) -> list[Any]:
    """What is to be walked of a value that is no object of lmkv."""
    if isinstance(one, dict | WeakKeyDictionary | WeakValueDictionary):
        return [*one.keys(), *one.values()]
    if isinstance(one, list | tuple | set | frozenset | deque | WeakSet):
        return [each for each in one if not isinstance(each, int | str | bytes)]
    if isinstance(one, types.MethodType):
        return [one.__self__]
    if isinstance(one, types.FunctionType):
        return list(inspect.getclosurevars(one).nonlocals.values())
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    return []
