"""The handoffs that one engine sends, as its stream requests them. Used by `EngineStream`."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.errors import Unreachable
from lmkv.keys import split_keys
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.handoff.sender import HandoffResult
from lmkv_server.node.handoff.senders import HandoffSenders


class EngineHandoffs:
    """One engine's handoffs. They end with its stream: no engine computes their chunks any more."""

    def __init__(
        self,
        spec: Callable[[], KvSpec],
        senders: HandoffSenders | None,
        answer: Callable[[pb.Event], None],
        drop_here: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`spec` is the engine's at the moment. `drop_here` ends a handoff that was to come to this node."""
        self._drop_here = drop_here
        self._spec = spec
        self._senders = senders
        self._answer = answer
        self._running: dict[str, str] = {}
        """The engine's id of the request, by handoff."""

    def begin(self, handoff: pb.HandChunks) -> None:
        """Begins one. A repeat changes nothing. Raises `BadChunkKey` if its keys make no sense."""
        keys = split_keys(handoff.chunk_keys)
        if handoff.handoff_id in self._running:
            return
        self._running[handoff.handoff_id] = handoff.engine_request_id
        if self._senders is None:
            alone = Unreachable("this node has no peers: set enable_p2p")
            self._ended(HandoffResult(handoff_id=handoff.handoff_id, error=alone))
            return
        self._senders.start(
            self._spec(),
            handoff_id=handoff.handoff_id,
            decode_instance_id=handoff.decode_instance_id,
            keys=keys,
            token_count=handoff.token_count,
            on_end=self._ended,
            traceparent=handoff.traceparent,
        )

    def end(self, ended: pb.EndHandoff) -> None:
        """No chunk of it will be committed any more."""
        if self._senders and ended.handoff_id in self._running:
            self._senders.end(ended.handoff_id)

    def drop(self, dropped: pb.DropHandoff) -> None:
        """No request will load it: of the prefill's side if it names the decode's instance, else of the decode's."""
        if not dropped.decode_instance_id:
            self._drop_here(dropped.handoff_id)
        elif self._senders is not None:
            self._senders.drop(dropped.handoff_id, dropped.decode_instance_id)

    def close(self) -> None:
        """Ends all: the engine is gone, or has other weights."""
        for handoff_id in list(self._running):
            if self._senders:
                self._senders.cancel(handoff_id)
        self._running.clear()

    def _ended(self, handed: HandoffResult) -> None:
        message = pb.HandedChunks(
            handoff_id=handed.handoff_id,
            engine_request_id=self._running.pop(handed.handoff_id, ""),
            chunk_count=handed.chunk_count,
            transferred_bytes=handed.size_bytes,
            transfer_duration=Duration(seconds=int(handed.seconds), nanos=int(handed.seconds % 1 * 1e9)),
            status=rpc.to_status(handed.error) if handed.error else None,
        )
        self._answer(pb.Event(handed=message))
