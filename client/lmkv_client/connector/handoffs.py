"""Handoffs that this engine, as a prefill, gives away: announced to the node at once, ended when all is stored."""

from __future__ import annotations

from collections.abc import Callable

from lmkv.keys import join_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.prompt import Prompt
from lmkv_client.connector.stats import Counters


class Handoffs:
    """The node hands each chunk on as it is committed; the engine only says when no more will be."""

    def __init__(
        self,
        send: Callable[[pb.AttachRequest], None],
        counters: Counters,
        is_storing: Callable[[Prompt], bool],
    ) -> None:
        """`is_storing` says whether chunks of a prompt are still being written."""
        self._send = send
        self._counters = counters
        self._is_storing = is_storing
        self._prompts: dict[str, Prompt] = {}
        """By handoff, until the node says how it went."""
        self._finished: dict[str, Prompt] = {}
        """Those whose request is over, and chunks of which may still be committed."""

    def begin(self, request_id: str, address: str, prompt: Prompt) -> None:
        """The request's prompt is to be handed to the node at this address."""
        self._prompts[request_id] = prompt
        handoff = pb.HandChunks(
            request_id=request_id,
            decode_address=address,
            chunk_keys=join_keys(prompt.keys),
            token_count=prompt.token_count if prompt.partial_key else prompt.full_count * prompt.chunk_size,
            traceparent=prompt.traceparent,
        )
        self._send(pb.AttachRequest(handoffs=[handoff]))

    def finished(self, prompt: Prompt) -> None:
        """The request is over; `settle` ends its handoff once everything is committed."""
        self._finished.update({name: one for name, one in self._prompts.items() if one is prompt})
        self.settle()

    def settle(self) -> None:
        """Ends the handoffs of which no chunk will be committed any more."""
        ended = [name for name, prompt in self._finished.items() if not self._is_storing(prompt)]
        for name in ended:
            del self._finished[name]
        if ended:
            self._send(pb.AttachRequest(ended_handoffs=ended))

    def ended(self, handed: pb.HandedChunks) -> None:
        """The node says how a handoff went."""
        prompt = self._prompts.pop(handed.request_id, None)
        self._finished.pop(handed.request_id, None)
        if prompt is None:
            return
        self._counters.add("handed_tokens", prompt.tokens_in(handed.chunk_count))
        self._counters.add("handed_bytes", handed.transferred_bytes)
        self._counters.add("handed_seconds", handed.transfer_duration.ToNanoseconds() / 1e9)
        self._counters.add("handoff_failures", int(handed.status.code != 0))

    def lost(self) -> None:
        """The node is gone, and its handoffs with it."""
        self._counters.add("handoff_failures", len(self._prompts))
        self._prompts.clear()
        self._finished.clear()
