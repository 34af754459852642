"""What engines tokenize of a request: nothing that the proxy cannot read as they do."""

from __future__ import annotations

from typing import Any

import pytest

from lmkv_server.proxy.openai import RESPONSES
from lmkv_server.proxy.upstream.tokenization import NotTokenizable, tokenize_body

CALL = {"type": "function_call", "name": "look", "call_id": "1", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "found"}


def messages_of(*items: dict[str, Any]) -> Any:
    """The messages of a chat that a request to `/v1/responses` is."""
    return tokenize_body(RESPONSES, {"model": "m", "input": list(items)})["messages"]


def test_calls_and_their_output_are_messages() -> None:
    assert messages_of(CALL, OUTPUT)[-1] == {"role": "tool", "content": "found", "tool_call_id": "1"}


@pytest.mark.parametrize("given", [7, None, {"text": "found"}, [{"type": "input_image", "image_url": "data:,"}]])
def test_calls_and_output_other_than_text_are_not_tokenized(given: Any) -> None:
    """An engine would put something else into its prompt, or refuse them: routing knows no key of theirs."""
    with pytest.raises(NotTokenizable, match="content other than text"):
        messages_of(CALL, OUTPUT | {"output": given})
    with pytest.raises(NotTokenizable, match="content other than text"):
        messages_of(CALL | {"arguments": given}, OUTPUT)
