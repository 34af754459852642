"""The parts of OpenAI's HTTP API that the proxy interprets. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
"""Anthropic's API."""
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that does not set it. A chat completion has no such default."""
_ERROR_TYPES = {404: "NotFoundError", 503: "ServiceUnavailableError"}


def error_body(status: int, message: str) -> bytes:
    """An error in the format of OpenAI's API."""
    kind = _ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
