"""Proof that a proxy of the fleet requested a handoff: an HMAC that clients of an engine's API cannot compute.

    key = HMAC-SHA-256(secret, "lmkv handoff v1 " ‖ name of the secret)
    mac = HMAC-SHA-256(key, request id ‖ decode instance ‖ expiry), each preceded by its length

The secret is `cluster_secret`, else the token of `auth_token` or `auth_token_file`. An engine accepts a MAC made with
either of its own. A fleet that has neither cannot distinguish its proxies from other clients: its engines then hand off
prompts to any registered instance that a request names.
"""

from __future__ import annotations

import hmac
import time

from lmkv.auth.credentials import HEADER, BearerToken, token_in
from lmkv.packing import pack_fields

LIFETIME_SECONDS = 900
"""Validity of a proof: longer than a request waits in an engine, with a margin for clock skew."""
FIX = "set the same cluster_secret, or the same auth_token, at the proxy and at its engines"


class HandoffKeys:
    """The keys with which a process creates and verifies proofs. The token's file may be replaced at any time."""

    def __init__(self, secret: str, token: BearerToken) -> None:
        self._secret = _derive(secret, "cluster_secret") if secret else b""
        self._token = token

    def prove(self, handoff_id: str, decode_instance: str, now: float | None = None) -> dict[str, str | int]:
        """Request parameters that prove a handoff to an engine; empty if there is no key."""
        keys = self._keys()
        if not keys:
            return {}
        expire_time = int((time.time() if now is None else now) + LIFETIME_SECONDS)
        return {"expire_time": expire_time, "mac": _mac(keys[0], handoff_id, decode_instance, expire_time)}

    def refusal(
        self, handoff_id: str, decode_instance: str, expire_time: object, mac: object, now: float | None = None
    ) -> str:
        """Why a proof is invalid, with the fix; empty if it is valid, or if there is no key to verify it with."""
        keys = self._keys()
        if not keys:
            return ""
        if not isinstance(mac, str) or not isinstance(expire_time, int) or not mac:
            return f"it has no proof of a proxy of this fleet; {FIX}"
        try:
            shown = bytes.fromhex(mac)
            expected = [bytes.fromhex(_mac(key, handoff_id, decode_instance, expire_time)) for key in keys]
        except (ValueError, OverflowError):
            return "its mac or expire_time is malformed"
        if not sum(hmac.compare_digest(shown, one) for one in expected):  # compares with all keys: constant time
            return f"its proof was made with another secret; {FIX}"
        if expire_time < (time.time() if now is None else now):
            return "its proof has expired; compare the clocks of the proxy and this engine"
        return ""

    def _keys(self) -> list[bytes]:
        """All keys; the first one, of the cluster secret if there is one, creates proofs."""
        token = token_in(dict(self._token.headers()).get(HEADER, ""))
        return [key for key in (self._secret, _derive(token, "auth_token") if token else b"") if key]


def _derive(secret: str, name: str) -> bytes:
    """A key for handoffs only, which other uses of the secret do not reveal."""
    return hmac.digest(secret.encode(), b"lmkv handoff v1 " + name.encode(), "sha256")


def _mac(key: bytes, handoff_id: str, decode_instance: str, expire_time: int) -> str:
    fields = [handoff_id.encode(), decode_instance.encode(), expire_time.to_bytes(8, "big")]
    return hmac.digest(key, pack_fields(fields), "sha256").hex()
