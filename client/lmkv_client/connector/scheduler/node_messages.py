"""Passes each event of the node to the object of the scheduler side that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkv.keys import ChunkKey
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.events import BlockEvents
from lmkv_client.connector.scheduler.handoffs import RequestHandoffs
from lmkv_client.connector.scheduler.hints.request_hints import RequestHints
from lmkv_client.connector.scheduler.loads.loads import Loads
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.stores import Stores
from lmkv_client.connector.stats import SPEC_CONFLICTS, ConnectorCounters
from lmkv_client.connector.vllm_api import init_logger

logger = init_logger("vllm.lmkv")


class NodeMessages:
    """Handles messages of the node, event by event."""

    def __init__(
        self,
        lookups: RequestLookups,
        loads: Loads,
        stores: Stores,
        handoffs: RequestHandoffs,
        hints: RequestHints,
        events: BlockEvents,
        counters: ConnectorCounters,
    ) -> None:
        self._lookups = lookups
        self._loads = loads
        self._stores = stores
        self._events = events
        self._counters = counters
        self._handlers: dict[str, Callable[[Any], object]] = {
            "welcome": self._handle_welcome,
            "found": lookups.handle_found,
            "loaded": self._handle_loaded,
            "granted": self._handle_granted,
            "rejected_commit": self._handle_rejected,
            "reset": self._handle_reset,
            "conflicts": self._handle_conflicts,
            "handed": handoffs.handle_ended,
            "tier_change": self._handle_tier_change,
            "hinted": hints.handle_answer,
        }
        self.welcome = pb.Welcome()
        """The latest welcome of a node."""
        self.reset_count = 0
        """Resets that nodes have confirmed."""

    def handle(self, message: pb.AttachResponse) -> None:
        """Hands each event of the message, in order, to the object that it concerns. Others are of later versions."""
        for event in message.events:
            kind = event.WhichOneof("event")
            if kind and (handler := self._handlers.get(kind)):
                handler(getattr(event, kind))

    def _handle_welcome(self, welcome: pb.Welcome) -> None:
        self.welcome = welcome
        self._stores.reset_credits(welcome.credit_limit)

    def _handle_granted(self, granted: pb.GrantedCredits) -> None:
        full = [(one.part, one.extent.offset) for one in granted.credits if not one.partial_token_count]
        partial = [(one.partial_token_count, one.extent.offset) for one in granted.credits if one.partial_token_count]
        self._stores.credits.settle(granted.settled_counts, full)
        self._stores.credits.settle_partial(granted.settled_partial_token_counts, partial)

    def _handle_loaded(self, loaded: pb.LoadedChunks) -> None:
        self._counters.add("peer_bytes", loaded.transferred_bytes)
        self._counters.add("peer_seconds", loaded.transfer_duration.ToNanoseconds() / 1e9)
        if not self._loads.handle_loaded(loaded):
            self._lookups.handle_loaded(loaded)

    def _handle_rejected(self, rejected: pb.RejectedCommit) -> None:
        logger.warning("the node refused chunk %s: %s", rejected.chunk_key.hex(), rejected.status.message)
        self._events.refused(ChunkKey(rejected.chunk_key))

    def _handle_tier_change(self, change: pb.TierChange) -> None:
        self._events.apply([change])

    def _handle_reset(self, _: pb.ResetResult) -> None:
        self.reset_count += 1

    def _handle_conflicts(self, conflicts: pb.SpecConflicts) -> None:
        self._counters.set(SPEC_CONFLICTS, len(conflicts.conflicts))
        for conflict in conflicts.conflicts:
            logger.warning(
                "shares nothing with instance %s, which also serves %s: %s is %s here and %s there",
                conflict.instance_id,
                conflict.model_name,
                conflict.field,
                conflict.own_value,
                conflict.other_value,
            )
