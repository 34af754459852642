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
import threading
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

_THREAD_LOCK = type(threading.Lock())
_SIZED = (dict, list, set, frozenset, deque, WeakSet, WeakKeyDictionary, WeakValueDictionary)
_WALKED = ("lmkv.", "lmkv_server.", "lmkv_client.", "contextlib.")
_VALUES = ("lmkv.errors.", "lmkv.config.", "lmkv.spec.", "lmkv.v1.", "lmkv.internal.")


def held(*roots: object) -> Counter[str]:
    """What is held: numbers and locks by `Class.attribute`, lengths by `len Class.attribute`, instances by `Class()`,
    and tasks by their coroutines."""
    counts = tasks()
    _walk(roots, counts)
    return counts


def tasks() -> Counter[str]:
    """The tasks of the running loop, by their coroutines."""
    names = (getattr(task.get_coro(), "__qualname__", task.get_name()) for task in asyncio.all_tasks())
    # Those of gRPC's clients are left out, which tests interrupt themselves.
    return Counter(f"task {name}" for name in names if not name.startswith("_AioCall."))


def reachable(*roots: object) -> list[object]:
    """All that can be reached. A test that keeps it sees what is closed, and not only forgotten."""
    return _walk(roots, Counter())


def opened() -> Counter[str]:
    """Open files, sockets and pipes of this process by number, its threads, and its mappings of shared memory."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            found[f"file {entry.name} {entry.readlink()}"] += 1
    for thread in threading.enumerate():
        found[f"thread {thread.name} {thread.ident}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, path = line.partition("/")
        if "lmkv" in path and not path.endswith((".so", ".py")):
            found[f"mapping {path}"] += 1
    return found


def _walk(roots: Iterable[object], counts: Counter[str]) -> list[object]:
    pending: list[Any] = [*roots, *_globals()]
    seen: dict[int, object] = {}
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if _is_walked(one):
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
    return list(seen.values())


@functools.cache
def _globals() -> tuple[object, ...]:
    modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(_WALKED)]
    values = [value for module in modules for value in vars(module).values()]
    return tuple(value for value in values if _is_walked(value) or type(value) in _SIZED)


def _is_walked(one: object) -> bool:
    kind: Any = type(one)
    return _is_walked_type(kind)


@functools.cache
def _is_walked_type(kind: type) -> bool:
    module = f"{kind.__module__}."
    return module.startswith(_WALKED) and not module.startswith(_VALUES) and not issubclass(kind, enum.Enum)


def _slots(kind: type) -> tuple[str, ...]:
    found = (each.__dict__.get("__slots__", ()) for each in kind.__mro__)
    names = (name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(one, "__dict__", {}).items())
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
    if isinstance(value, asyncio.Future | Future):
        return not value.done()
    if isinstance(value, _THREAD_LOCK):
        return value.locked()
    return None


@functools.cache
def _container(kind: type) -> type | None:
    """The type by which values of another are walked; None if nothing is inside. Most values are of a few types."""
    containers = (dict, WeakKeyDictionary, WeakValueDictionary, list, tuple, set, frozenset, deque, WeakSet)
    callables = (types.MethodType, types.FunctionType, functools.partial)
    return next((each for each in (*containers, *callables) if issubclass(kind, each)), None)


def _inside(one: Any) -> list[Any]:
    """What is to be walked of a value that is no object of lmkv."""
    its: Any = type(one)
    kind = _container(its)
    if kind is None:
        return []
    if kind is WeakKeyDictionary and isinstance(next(iter(one), None), asyncio.AbstractEventLoop):
        return [one.get(asyncio.get_running_loop())]  # loops of earlier tests vanish at any time
    if kind in (dict, WeakKeyDictionary, WeakValueDictionary):
        return [*one.keys(), *one.values()]
    if kind is types.MethodType:
        return [one.__self__]
    if kind is types.FunctionType:
        return list(inspect.getclosurevars(one).nonlocals.values())
    if kind is functools.partial:
        return [one.func, *one.args, *one.keywords.values()]
    return [each for each in one if not isinstance(each, int | str | bytes)]
