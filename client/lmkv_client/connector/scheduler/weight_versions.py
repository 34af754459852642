"""The version of the engine's weights, and whether vLLM's pages may have KV of an earlier version. Pure."""

from __future__ import annotations

from hashlib import sha256
from uuid import uuid4

from lmkv.spec import MAX_FIELD_BYTES, PRIVATE_VERSION


class WeightVersions:
    """Weights that have changed have no name until a user gives them one: until then the version is private, and
    shared with no other engine. It is made when it is first needed, however many calls have changed the weights."""

    def __init__(self, version: str = "") -> None:
        """`version` is that of the weights with which the engine starts; empty if they never change."""
        self.current = version
        self.pages_are_stale = False
        """Whether vLLM's prefix cache may have KV of an earlier version."""
        self._is_named = bool(version)
        self._has_changed = False
        self._has_pages = False

    def changed(self) -> None:
        self._has_changed = True

    def reset(self) -> None:
        """The user wants nothing that was computed so far to be used again. Where the version has a name, this says
        nothing about the weights; otherwise they may have changed in a way that cannot be seen."""
        self._has_changed |= not self._is_named

    def take_change(self) -> bool:
        """Begins a private version if the weights have changed; whether they have."""
        return self._has_changed and self._begin(f"{PRIVATE_VERSION}{uuid4().hex}", is_named=False)

    def name(self, version: str) -> bool:
        """Names the weights; whether their version is another now. A name may be of any length; without a name the
        version is private."""
        if not version:
            self.changed()
            return False
        if len(version.encode()) > MAX_FIELD_BYTES:
            version = sha256(version.encode()).hexdigest()
        if version == self.current and not self._has_changed:
            self._is_named = True
            return False
        return self._begin(version, is_named=True)

    def computed(self) -> None:
        """vLLM has computed or loaded KV."""
        self._has_pages = True

    def pages_cleared(self) -> None:
        """vLLM's prefix cache is empty."""
        self._has_pages = self.pages_are_stale = False

    def _begin(self, version: str, *, is_named: bool) -> bool:
        self.current = version
        self._is_named = is_named
        self._has_changed = False
        self.pages_are_stale |= self._has_pages
        return True
