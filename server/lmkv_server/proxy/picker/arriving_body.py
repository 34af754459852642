"""The body of a request while it arrives: token ids are read, hashed and looked up in advance of its end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmkv_server.proxy.routing.arriving_prompt import ArrivingPrompt
from lmkv_server.proxy.routing.growing_chains import GrowingChains
from lmkv_server.proxy.routing.key_lookup import KeyLookup
from lmkv_server.proxy.routing.prompt import PromptRequest


class ArrivingBody:
    """The parts of one body. Without `lookup` no keys are computed."""

    def __init__(self, lookup: KeyLookup | None) -> None:
        self._lookup = lookup
        self._prompt = ArrivingPrompt()
        self._is_begun = False
        self.chains: GrowingChains | None = None
        """The keys of the token ids so far, for the model and salt that the body has before them."""
        self.size_bytes = 0
        """Memory of the token ids."""

    def add(self, part: bytes, *, is_last: bool) -> None:
        """Takes a part."""
        self._hash(self._prompt.add(part, is_last=is_last), looks_ahead=not is_last)

    def read(self, path: str) -> PromptRequest:
        """The request, once all parts were taken. Raises `NotJson`."""
        self._hash(self._prompt.end(), looks_ahead=False)
        if self.chains is not None:
            self.chains.stop_asking()
        request = self._prompt.read(path)
        if not self._prompt.has_returned_tokens:
            self.chains = None
        return request

    def clear(self) -> None:
        """Frees what was read."""
        if self.chains is not None:
            self.chains.stop_asking()
        self._prompt, self.chains, self.size_bytes = ArrivingPrompt(), None, 0

    def _hash(self, tokens: NDArray[np.uint32], *, looks_ahead: bool) -> None:
        self.size_bytes += tokens.nbytes
        if not tokens.size or self._lookup is None:
            return
        if not self._is_begun:
            self._is_begun = True
            before = PromptRequest(path="", body=self._prompt.fields)
            self.chains = self._lookup.begin(before.model_name, before.cache_salt)
        if self.chains is not None:
            self.chains.add(tokens)
            if looks_ahead:
                self._lookup.look_ahead(self.chains)
