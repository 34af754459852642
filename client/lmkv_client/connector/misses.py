"""How prompts differ from earlier ones that began alike, and what clients learn of misses. For the scheduler side."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from lmkv.keys import ChunkKey, Tokens
from lmkv.misses import MissReason, reason_name
from lmkv.v1.chunk_pb2 import MISS_REASON_OTHER_SALT, PromptSpan

MAX_BEGINNINGS = 4096
"""Beginnings of prompts that are remembered."""


class Beginnings:
    """The first tokens of prompts, and the cache salts and roots of key chains under which they were served last."""

    def __init__(self) -> None:
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, cache_salt: str, tokens: Tokens, extra: bytes, root: ChunkKey) -> MissReason | None:
        """Notes a prompt with these first tokens; how the last one that had them differs in its namespace."""
        salt = sha256(cache_salt.encode()).digest()
        beginning = sha256(b"\0".join((extra, tokens.tobytes()))).digest()
        other_root = _replace(self._roots, beginning + salt, root)
        other_salt = _replace(self._salts, beginning, salt)
        if other_root:
            return MissReason.OTHER_NAMESPACE
        return MissReason.OTHER_SALT if other_salt else None


def _replace(values: OrderedDict[bytes, bytes], key: bytes, value: bytes) -> bool:
    """Sets the value of a key as the latest; whether it had another value."""
    earlier = values.pop(key, value)
    values[key] = value
    if len(values) > MAX_BEGINNINGS:
        values.popitem(last=False)
    return earlier != value


def spans_in_answer(spans: Sequence[PromptSpan]) -> list[dict[str, str | int]]:
    """The spans as JSON, for the answer to a request that has asked for them.

    Clients do not learn that there are other salts.
    """
    found: list[dict[str, str | int]] = []
    for span in spans:
        one: dict[str, str | int] = {"token_count": span.token_count}
        if span.tier:
            one["tier"] = span.tier
        if span.reason:
            is_secret = span.reason == MISS_REASON_OTHER_SALT
            one["reason"] = MissReason.NEVER_STORED.value if is_secret else reason_name(span.reason)
        if span.HasField("remove_time"):
            one["remove_time"] = span.remove_time.ToJsonString()
        found.append(one)
    return found
