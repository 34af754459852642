"""`kv_transfer_params.lmkv` of requests at an engine: a handoff without a proof of a proxy of the fleet is refused."""

from __future__ import annotations

import json
import time
from typing import Any

from lmkv.auth import handoff as proofs
from lmkv.auth.credentials import BearerToken
from lmkv.auth.handoff import HandoffKeys
from lmkv_client.connector.scheduler.handoff import (
    MAX_NAME,
    PARAMS,
    HandoffRefused,
    handoff_of,
    is_addressed,
    wants_explanation,
)
from tests.fuzz.inputs import Input

COVERS = ("lmkv_client.connector.scheduler.handoff", "lmkv.auth.handoff")
MAX_REFUSAL = 300
"""Characters: refusals are logged, and must not repeat what a client sent."""
KEYS = (
    HandoffKeys("", BearerToken()),
    HandoffKeys("secret", BearerToken()),
    HandoffKeys("", BearerToken(text="token")),
    HandoffKeys("secret", BearerToken(text="token")),
)
PROVE = 0x80
"""Bit of the first byte: the names get a valid proof."""


def _params(**fields: Any) -> bytes:
    return json.dumps({PARAMS: {"handoff_id": "r", "decode_instance": "a"} | fields}).encode()


SEEDS = [
    b"\x81" + _params(),
    b"\x83" + _params(prompt_token_count=5, explain=True),
    b"\x00" + _params(prompt_token_count=True),
    b"\x01" + _params(expire_time=9_999_999_999, mac="00" * 32),
    b"\x01" + _params(expire_time=-1, mac="00" * 32),
    b"\x01" + _params(expire_time=1 << 64, mac="0g"),
    b"\x02" + _params(expire_time=True, mac=""),
    b"\x03" + _params(handoff_id="x" * 300, mac=[]),
    b"\x00" + _params(decode_instance="\u00e9"),
    b"\x00" + json.dumps({PARAMS: []}).encode(),
]


def run(data: bytes) -> None:
    """The first byte selects the keys of the engine."""
    source = Input(data)
    selected = source.byte()
    keys = KEYS[selected % len(KEYS)]
    try:
        params = json.loads(source.rest())
    except (ValueError, RecursionError):  # refused before
        return
    fields = params.get(PARAMS) if isinstance(params, dict) else None
    if selected & PROVE and isinstance(fields, dict):
        name, instance = str(fields.get("handoff_id")), str(fields.get("decode_instance"))
        if name.isascii() and instance.isascii():
            fields |= keys.prove(name, instance)
    assert is_addressed(params) == isinstance(fields, dict)
    assert wants_explanation(params) in (True, False)
    _check(params, fields, keys)


def _check(params: Any, fields: Any, keys: HandoffKeys) -> None:
    try:
        found = handoff_of(params, keys)
    except HandoffRefused as refused:
        assert len(str(refused)) <= MAX_REFUSAL
        assert str(refused).isprintable()
        return
    if found is None:
        assert not isinstance(fields, dict) or "handoff_id" not in fields
        return
    for name in (found.handoff_id, found.decode_instance):
        assert 0 < len(name) <= MAX_NAME
        assert name.isprintable()
    assert found.is_prefill == (found.prompt_token_count is None)
    assert found.is_prefill or found.prompt_token_count >= 0  # type: ignore[operator]
    if own := keys._keys():
        expire_time = fields["expire_time"]
        assert expire_time >= time.time() - 1
        macs = [proofs._mac(key, found.handoff_id, found.decode_instance, expire_time) for key in own]
        assert bytes.fromhex(fields["mac"]).hex() in macs, "a handoff without a proof"
