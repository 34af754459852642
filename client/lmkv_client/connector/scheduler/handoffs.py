"""Handoffs of this engine's requests: sent by a prefill, received by a decode, refused, or dropped."""

from __future__ import annotations

import time

from lmkv.auth.handoff import HandoffKeys
from lmkv.config import ConnectorConfig
from lmkv.keys import join_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.handoff import HandoffParams, HandoffRefused, handoff_of
from lmkv_client.connector.scheduler.request_state import RequestLookup, RequestState
from lmkv_client.connector.scheduler.stores import Stores
from lmkv_client.connector.vllm_api import Request, init_logger
from lmkv_client.engine.session import Session

logger = init_logger("vllm.lmkv")

QUIET_SECONDS = 10.0
"""Time between two log lines about refused handoffs: clients can request any number of them."""


class RequestHandoffs:
    """The handoffs of an engine's requests: a prefill's node sends each chunk when it is committed, until the engine
    reports the last one."""

    def __init__(self, config: ConnectorConfig, session: Session[RequestLookup], stores: Stores) -> None:
        self._is_enabled = config.enable_pd
        self._keys = HandoffKeys(config.cluster_secret, config.credentials.token)
        self._session = session
        self._stores = stores
        self._states: dict[str, RequestState] = {}
        """The key is the handoff; the node reports when one ends."""
        self._finished: dict[str, RequestState] = {}
        """Handoffs whose request has finished, while chunks of it may still be committed."""
        self._begun: dict[str, HandoffParams] = {}
        """Handoffs that requests of this engine send, by the request."""
        self._refusals: dict[str, str] = {}
        """The reasons why handoffs were refused or have failed, by the request."""
        self._quiet_until = 0.0

    def read(self, request: Request) -> HandoffParams | None:
        """The request's handoff; None if it names none, or if it is refused."""
        try:
            handoff = handoff_of(request.kv_transfer_params, self._keys)
            if handoff is None:
                return None
            if not self._is_enabled:
                raise HandoffRefused("enable_pd is off at this engine")
            if self._session.attachment is None:
                raise HandoffRefused("this engine has no node at the moment")
            if not handoff.is_prefill and handoff.decode_instance != self._session.welcome.instance_id:
                raise HandoffRefused("it is for the decode engine of another instance")
        except HandoffRefused as refusal:
            self._refuse(request.request_id, str(refusal))
            return None
        return handoff

    def _refuse(self, request_id: str, why: str) -> None:
        self._refusals[request_id] = why
        self._session.counters.add("handoff_failures")
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            logger.warning("the handoff of request %s does not take place: %s", request_id, why)

    def refusal(self, request_id: str) -> str:
        """Returns the reason why the handoff of a request was refused or has failed; empty if it did neither."""
        return self._refusals.get(request_id, "")

    def begin(self, handoff: HandoffParams, request_id: str, state: RequestState | None) -> None:
        """Asks the node to send the request's prompt to the decode's node."""
        if state is None or not state.keys:
            self._refusals[request_id] = "nothing of the prompt can be stored"
            return
        self._states[handoff.handoff_id] = state
        self._begun[state.request_id] = handoff
        message = pb.HandChunks(
            handoff_id=handoff.handoff_id,
            engine_request_id=state.request_id,
            decode_instance_id=handoff.decode_instance,
            chunk_keys=join_keys(state.keys),
            token_count=state.tokens_in(len(state.keys)),
            traceparent=state.traceparent,
        )
        self._session.send(pb.Act(hand=message))

    def drop(self, handoff: HandoffParams) -> None:
        """Ends a handoff that no request will load."""
        instance_id = handoff.decode_instance if handoff.is_prefill else ""
        dropped = pb.DropHandoff(handoff_id=handoff.handoff_id, decode_instance_id=instance_id)
        self._session.send(pb.Act(drop_handoff=dropped))

    def finished(self, state: RequestState, *, is_aborted: bool) -> None:
        """Ends the handoff of a finished request: now if it was aborted, else in `settle`, once all is committed."""
        handoff = self._begun.pop(state.request_id, None)
        if handoff is not None and is_aborted:
            self._states.pop(handoff.handoff_id, None)
            self.drop(handoff)
            return
        self._finished.update({name: one for name, one in self._states.items() if one is state})
        self.settle()

    def forget(self, request_id: str) -> None:
        """Removes what is kept for the response of a finished request."""
        self._refusals.pop(request_id, None)

    def settle(self) -> None:
        """Ends the handoffs of which no chunk will be committed any more."""
        ended = [name for name, state in self._finished.items() if not self._stores.is_writing(state)]
        for name in ended:
            del self._finished[name]
        if ended:
            self._session.send(*(pb.Act(end_handoff=pb.EndHandoff(handoff_id=name)) for name in ended))

    def handle_ended(self, handed: pb.HandedChunks) -> None:
        """Counts a handoff that has ended."""
        state = self._states.pop(handed.handoff_id, None)
        self._finished.pop(handed.handoff_id, None)
        if state is None:
            return
        self._session.counters.add("handed_tokens", state.tokens_in(min(handed.chunk_count, len(state.keys))))
        self._session.counters.add("handed_bytes", handed.transferred_bytes)
        self._session.counters.add("handed_seconds", handed.transfer_duration.ToNanoseconds() / 1e9)
        self._session.counters.add("handoff_failures", int(handed.status.code != 0))
        if handed.status.code and not handed.chunk_count and state.request_id in self._begun:
            self._refusals[state.request_id] = handed.status.message  # its request has not finished yet

    def fail(self, why: str) -> None:
        self._session.counters.add("handoff_failures", len(self._states))
        self._refusals |= dict.fromkeys(self._begun, why)
        self._begun.clear()
        self._states.clear()
        self._finished.clear()
