"""Counts the tokens in the events of a stream. Pure."""

from __future__ import annotations

import msgspec

from lmkv_server.proxy.upstream.events import data_of

MAX_TOKENS = 1024
"""Maximum number of tokens that one event counts as. An engine may report any number."""


class _Delta(msgspec.Struct, gc=False):
    role: msgspec.Raw = msgspec.Raw()
    content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _TokenUsage(msgspec.Struct, gc=False):
    completion_tokens: int = 0


class _StreamEvent(msgspec.Struct, gc=False):
    choices: tuple[_Choice, ...] = ()
    usage: _TokenUsage | None = None


_decode = msgspec.json.Decoder(_StreamEvent).decode
"""Decodes these fields and skips the others."""


class TokenCounter:
    """Counts the tokens of one stream, event by event."""

    def __init__(self) -> None:
        self._sum = 0
        """Tokens so far, by the engine's own count if it reports one."""

    def count(self, event: bytes) -> int:
        """The number of tokens in the event: by the engine's count, else by token ids, else one per choice with text.

        The first event of a chat, which has only a role, and the last one, which has only the usage, have none. Events
        of the Responses and the Messages API have names; those with a part of the output count as one token.
        """
        if event.startswith(b"event:"):
            name = event.partition(b"\n")[0].strip()
            return int(name.endswith(b"delta") and not name.endswith(b"message_delta"))
        if b'"choices"' not in event:
            return 0
        try:
            event_content = _decode(data_of(event))
        except (msgspec.DecodeError, UnicodeDecodeError):  # it is forwarded nevertheless
            return 0
        if not event_content.choices:
            return 0
        if event_content.usage is not None:
            count = max(event_content.usage.completion_tokens - self._sum, 0)
        else:
            count = sum(map(_tokens_in, event_content.choices))
        self._sum += count
        return min(count, MAX_TOKENS)


def _tokens_in(choice: _Choice) -> int:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    if delta is None or delta.content or delta.reasoning or not delta.role or choice.finish_reason:
        return 1
    return int(bool(delta.tool_calls) and bytes(delta.tool_calls) not in (b"null", b"[]"))
