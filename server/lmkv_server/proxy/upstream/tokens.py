"""How many tokens each event of a stream carries, however its JSON is written. No IO."""

from __future__ import annotations

import msgspec

from lmkv_server.proxy.upstream.events import data_of

MAX_TOKENS = 1024
"""Most tokens that one event counts as, whatever it says."""


class _Delta(msgspec.Struct, gc=False):
    role: msgspec.Raw = msgspec.Raw()
    content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int = 0


class _Event(msgspec.Struct, gc=False):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Event).decode
"""Reads these fields and skips the others."""


class TokenCount:
    """Counts the tokens of one stream, event by event."""

    def __init__(self) -> None:
        self._sum = 0
        """Tokens so far, by the engine's own count where it gives one."""

    def of(self, event: bytes) -> int:
        """Tokens that the event carries: by the engine's count, by their ids, else one for each choice that has any.

        The first event of a chat, which only names a role, and the last, which has only the usage, carry none.
        """
        if b'"choices"' not in event:
            return 0
        try:
            read = _decode(data_of(event))
        except (msgspec.DecodeError, UnicodeDecodeError):  # whatever it is, the client gets it
            return 0
        if not read.choices:
            return 0
        if read.usage is not None:
            count = max(read.usage.completion_tokens - self._sum, 0)
        else:
            count = sum(map(_tokens_in, read.choices))
        self._sum += count
        return min(count, MAX_TOKENS)


def _tokens_in(choice: _Choice) -> int:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    if delta is None or delta.content or delta.reasoning or not delta.role or choice.finish_reason:
        return 1
    return int(bool(delta.tool_calls) and bytes(delta.tool_calls) not in (b"null", b"[]"))
