"""Explores every interleaving of a small model of lmkv's own classes, breadth first, and finds the shortest violation.

A model drives real objects, which cannot be copied in general (tables in C++, coroutines). So a state is kept as the
list of actions that lead to it, and reached by taking these actions again from the start; a model must be
deterministic. Two lists that end in the same fingerprint are one state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

Action = tuple[Hashable, ...]
"""Its name, and its arguments."""


class Model(Protocol):
    """Real objects, what a model has done to them, and what they promised."""

    def actions(self) -> Sequence[Action]:
        """What may happen next."""

    def apply(self, action: Action) -> None:
        """Takes an action. Raises `AssertionError` if its result breaks a promise."""

    def fingerprint(self) -> object:
        """All that later behaviour depends on, with a canonical `repr`: without addresses and random ids."""

    def check(self) -> None:
        """Asserts what holds after every action."""

    def settle(self) -> None:
        """Ends all that is under way, and asserts what holds then. The model is not used afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counterexample:
    """A shortest list of actions that breaks a promise."""

    actions: tuple[Action, ...]
    error: BaseException
    settling: bool
    """Whether it appears only when all that is under way is ended after the actions."""

    def __str__(self) -> str:
        steps = [f"  {number}. {_shown(action)}" for number, action in enumerate(self.actions, 1)]
        if self.settling:
            steps.append(f"  {len(steps) + 1}. settle")
        return "\n".join([f"{type(self.error).__name__}: {self.error}", *steps])


@dataclass(frozen=True, kw_only=True, slots=True)
class Exploration:
    state_count: int
    transition_count: int
    depth: int
    """Every list of this many actions was taken."""
    is_complete: bool
    """Whether no further state can be reached, at any depth."""
    counterexample: Counterexample | None = None


class _Violation(Exception):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class _State:
    """A state by the action that first led to it, and what may happen next."""

    before: _State | None
    action: Action | None
    enabled: Sequence[Action]

    def path(self) -> Iterator[Action]:
        if self.before is not None:
            assert self.action is not None
            yield from self.before.path()
            yield self.action


def explore(make: Callable[[], Model], *, depth: int, limit_seconds: float | None = None) -> Exploration:
    """Explores all states within `depth` actions of the start; ends at the first violation.

    After `limit_seconds` the level under way is given up: the result is about the levels before.
    """
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    seen: set[bytes] = set()
    transition_count = reached = 0
    counted = (0, 0)

    def visit(before: _State | None, action: Action | None) -> _State | None:
        """The state after an action, if it is a new one. Raises `_Violation` from what was raised."""
        path = () if before is None else tuple(before.path())
        settling = False
        try:
            model = make()
            for earlier in path:
                model.apply(earlier)
            if action is not None:
                model.apply(action)
            model.check()
            shown = repr(model.fingerprint())
            assert " object at 0x" not in shown, (
                f"a fingerprint has an address, so that no two states are equal: {shown}"
            )
            digest = blake2b(shown.encode(), digest_size=16).digest()
            if digest in seen:
                return None
            seen.add(digest)
            enabled = tuple(model.actions())
            settling = True
            model.settle()
        except Exception as error:
            taken = path if action is None else (*path, action)
            raise _Violation(Counterexample(actions=taken, error=error, settling=settling)) from error
        return _State(before, action, enabled)

    try:
        first = visit(None, None)
        assert first is not None
        level = [first]
        counted = (len(seen), transition_count)
        while level and reached < depth:
            following = []
            for state in level:
                for action in state.enabled:
                    if deadline is not None and time.monotonic() > deadline:
                        return Exploration(
                            state_count=counted[0], transition_count=counted[1], depth=reached, is_complete=False
                        )
                    transition_count += 1
                    found = visit(state, action)
                    if found is not None:
                        following.append(found)
            level = following
            reached += 1
            counted = (len(seen), transition_count)
    except _Violation as violation:
        return Exploration(
            state_count=len(seen),
            transition_count=transition_count,
            depth=reached,
            is_complete=False,
            counterexample=violation.args[0],
        )
    return Exploration(state_count=counted[0], transition_count=counted[1], depth=reached, is_complete=not level)


def _shown(action: Action) -> str:
    name, *arguments = action
    return f"{name}({', '.join(map(str, arguments))})"
