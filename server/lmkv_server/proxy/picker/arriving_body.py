"""The body of a request while it arrives: token ids are read, hashed and looked up in advance of its end."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import numpy as np
from numpy.typing import NDArray

from lmkv.runtime import turns
from lmkv.runtime.memory_budget import JsonSize
from lmkv_server.proxy.routing.arriving_prompt import ArrivingPrompt
from lmkv_server.proxy.routing.early_lookup import EarlyLookup
from lmkv_server.proxy.routing.key_lookup import KeyLookup
from lmkv_server.proxy.routing.prompt import PromptRequest


class ArrivingBody:
    """The parts of one body, which `caller` sends. Without `lookup` no keys are computed."""

    def __init__(self, caller: str, lookup: KeyLookup | None) -> None:
        self._caller = caller
        self._lookup = lookup
        self._prompt = ArrivingPrompt()
        self.early: EarlyLookup | None = None
        """The lookup of the token ids so far, for the model and salt that the body has before them."""
        self.size_bytes = 0
        """Memory of the token ids."""
        self._decoded = JsonSize()

    def add(self, part: bytes, *, is_last: bool) -> None:
        """Takes a part."""
        self._decoded.add(part)
        self._take(self._prompt.add(part, is_last=is_last), is_last=is_last)

    @property
    def decoded_bytes(self) -> int:
        """An upper bound of the memory that the body takes once it is decoded, its text included."""
        return self._decoded.size_bytes

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Inside, it is the turn of this body to be decoded."""
        return turns.of_loop().take(self._caller, self._decoded.text_bytes)

    def read(self, path: str) -> PromptRequest:
        """The request, once all parts were taken. Raises `NotJson`."""
        self._take(self._prompt.end(), is_last=True)
        if self.early is not None:
            self.early.stop()
        request = self._prompt.read(path)
        if not self._prompt.has_returned_tokens:
            self.early = None
        return request

    def clear(self) -> None:
        """Ends the lookup, and frees what was read. Idempotent."""
        if self.early is not None:
            self.early.stop()
        self._prompt, self.early, self.size_bytes, self._decoded = ArrivingPrompt(), None, 0, JsonSize()

    def _take(self, tokens: NDArray[np.uint32], *, is_last: bool) -> None:
        self.size_bytes += tokens.nbytes
        if not tokens.size or self._lookup is None:
            return
        if self.early is None:
            before = PromptRequest(path="", body=self._prompt.fields)
            self.early = EarlyLookup(self._lookup, before.model_name, before.cache_salt)
        self.early.add(tokens, is_last=is_last)
