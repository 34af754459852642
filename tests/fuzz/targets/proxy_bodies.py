"""Bodies of clients' requests at the proxy, and events of engines: split for two engines, or refused as not JSON."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from lmkv_server.http.json_text import NotJson, decode_object
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, EventSplitter, data_of, error_body, event_of
from lmkv_server.proxy.passthrough import _lacks_path
from lmkv_server.proxy.pd.parameters import (
    HINTS,
    decode_body,
    needs_one_engine,
    prefill_body,
    repeat_reason,
    without_handoff,
    without_hints,
)
from lmkv_server.proxy.routing.prompt import ArrivingPrompt, PromptRequest, read_prompt
from lmkv_server.proxy.upstream.client import HttpResponse
from tests.fuzz.inputs import Input

COVERS = (
    "lmkv_server.proxy.pd.parameters",
    "lmkv_server.proxy.routing.prompt",
    "lmkv_server.proxy.upstream.client",
    "lmkv_server.proxy.engine",
    "lmkv_server.proxy.passthrough",
)
PROMPT, DELIVERED = list(range(20)), [7, 8]
HANDOFF = {"handoff_id": "h", "instance_id": "a"}


def _body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": [1, 2, 3]} | fields).encode()


SEEDS = [
    b"\0" + _body(max_tokens=10, min_tokens=3, temperature=0, seed=5, stop=[""], n=1),
    b"\0" + _body(prompt=[[1, 2]], stream=True, stream_options={"include_usage": True}, logprobs=0, echo=True),
    b"\0" + _body(kv_transfer_params={"lmkv": {"kv_hints": {"actions": []}, "x": 1}, "other": 2}, user="u"),
    b"\0" + _body(prompt=["a", "b"], prompt_embeds=1, use_beam_search=True),
    b"\1"
    + _body(prompt=None, messages=[{"role": "user", "content": [{"type": "image_url"}]}], max_completion_tokens=5),
    b"\1" + _body(messages=[{"content": "hi"}], min_tokens="1", stream_options=[], response_format={"type": "text"}),
    b"\1" + _body(messages=[{"content": "hi"}], min_tokens="1")[:-1] + b', "": 1}',
    b"\0" + b'{"a":' * 400 + b"1" + b"}" * 400,
    b'\0{"prompt": [1, 2.5], "prompt": [3]}',
    b'\0{"x": "\\"prompt\\": [1]", "prompt": [1 ,2, 4294967295]}',
    b"\2data: {}\n\n: comment\n\ndata: [DONE]\n\nda",
    b'\3{"error": {"message": "Not Found"}}',
    b'\3{"detail": "Not Found"}',
]


def run(data: bytes) -> None:
    """The first byte selects the path, the events of an engine, or its error."""
    source = Input(data)
    selected = source.byte() % 4
    if selected == 2:
        _events(source)
    elif selected == 3:
        _error(source.rest())
    else:
        _request((COMPLETIONS, CHAT)[selected], source.rest())


def _request(path: str, content: bytes) -> None:
    body: dict[str, Any] | None = None
    with suppress(NotJson):
        body = decode_object(content)
    try:
        request = read_prompt(path, content)
    except NotJson as error:
        assert body is None, error  # the other decoder reads it
        return
    assert body is not None
    _check_parts(path, content, request)
    _check_prompt(request.body, request.tokens.tolist() if request.tokens is not None else None, body)
    assert isinstance(request.model_name + request.cache_salt + request.user, str)
    assert isinstance(request.text_prompt, str)
    assert request.has_text in (True, False)
    admitted = without_handoff(body)
    assert _lmkv(admitted).keys() <= {HINTS}
    assert not _lmkv(without_hints(body))
    assert without_handoff(admitted) == admitted
    needs_one_engine(admitted)
    reason = repeat_reason(admitted, path)
    for handoff in (HANDOFF, None):
        prefill = prefill_body(admitted, handoff, with_tokens=not reason)
        assert prefill["max_tokens"] == 1
        assert prefill["stream"] is False
        _check_handoff(prefill, handoff)
        assert HINTS not in _lmkv(prefill), "hints are carried out twice"
        if not reason:
            decode = decode_body(admitted, path, PROMPT, DELIVERED, handoff)
            _check_handoff(decode, handoff)
            limit = admitted.get("max_tokens")
            assert not limit or decode["max_tokens"] == limit - len(DELIVERED)
            assert (decode.get("min_tokens") or 0) >= 0
            assert _encoded(decode)
        assert _encoded(prefill)


def _check_parts(path: str, content: bytes, request: PromptRequest) -> None:
    """A body that arrives in parts is read as the whole."""
    arriving = ArrivingPrompt()
    early = [arriving.add(content[at : at + 5]) for at in range(0, len(content), 5)]
    early.append(arriving.end())
    found = arriving.read(path)
    assert found.body == request.body
    assert (found.tokens is None) == (request.tokens is None)
    if request.tokens is not None and found.tokens is not None:
        assert found.tokens.tolist() == request.tokens.tolist()
        if arriving.has_returned_tokens:
            assert np.concatenate(early).tolist() == request.tokens.tolist(), "what is hashed in advance"


def _check_prompt(rest: dict[str, Any], tokens: list[int] | None, body: dict[str, Any]) -> None:
    """Lifting the token ids out of a body changes nothing else."""
    if tokens is None:
        assert rest == body
        return
    assert body["prompt"] in (tokens, [tokens])
    assert {**rest, "prompt": 0} == {**body, "prompt": 0}


def _lmkv(body: dict[str, Any]) -> dict[str, Any]:
    parameters = body.get("kv_transfer_params")
    own = parameters.get("lmkv", {}) if isinstance(parameters, dict) else {}
    return own if isinstance(own, dict) else {}


def _check_handoff(body: dict[str, Any], handoff: dict[str, str] | None) -> None:
    parameters = body.get("kv_transfer_params") or {}
    if isinstance(parameters, dict):
        own = {name: value for name, value in _lmkv(body).items() if name != HINTS}
        assert own == (handoff or {}), "an engine gets handoff parameters that the proxy did not set"


def _encoded(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def _events(source: Input) -> None:
    splitter, whole = EventSplitter(), EventSplitter()
    content = source.rest()
    parts = [content[at : at + 3] for at in range(0, len(content), 3)]
    events = [event for part in parts for event in splitter.feed(part)]
    assert events == whole.feed(content), "events depend on how bytes arrive"
    assert content.startswith(b"".join(events))
    for event in events:
        assert event.endswith(b"\n\n")
        data = data_of(event)
        assert not data or data_of(event_of(data)) == data


def _error(content: bytes) -> None:
    assert _lacks_path(HttpResponse(status=404, body=content)) in (True, False)
    text = content.decode(errors="replace")
    assert json.loads(error_body(400, text))["error"]["message"] == text
