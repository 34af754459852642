"""What a node's messages mean to the scheduler side: each field goes to the object that waits for it."""

from __future__ import annotations

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
    """Handles messages of the node, field by field."""

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
        self._handoffs = handoffs
        self._hints = hints
        self._events = events
        self._counters = counters
        self.welcome = pb.Welcome()
        """The latest welcome of a node."""
        self.reset_count = 0
        """Resets that nodes have confirmed."""

    def handle(self, message: pb.AttachResponse) -> None:
        """Hands each field of the message to the object that it concerns."""
        if message.HasField("welcome"):
            self.welcome = message.welcome
            self._stores.reset_credits(message.welcome.credit_limit)
        self._handle_credits(message)
        for found in message.found:
            self._lookups.handle_found(found)
        for loaded in message.loaded:
            self._counters.add("peer_bytes", loaded.transferred_bytes)
            self._counters.add("peer_seconds", loaded.transfer_duration.ToNanoseconds() / 1e9)
            if not self._loads.handle_loaded(loaded):
                self._lookups.handle_loaded(loaded)
        for handed in message.handed:
            self._handoffs.handle_ended(handed)
        for hinted in message.hinted:
            self._hints.handle_answer(hinted)
        for rejected in message.rejected_commits:
            logger.warning("the node refused chunk %s: %s", rejected.chunk_key.hex(), rejected.status.message)
            self._events.refused(ChunkKey(rejected.chunk_key))
        self._events.apply(message.tier_changes)
        self.reset_count += len(message.reset_counts)
        self._handle_conflicts(message)

    def _handle_credits(self, message: pb.AttachResponse) -> None:
        settled = (message.settled_reserve_count, *message.settled_part_reserve_counts)
        full = [(extent.part, extent.offset) for extent in message.credits if not extent.token_count]
        partial = [(extent.token_count, extent.offset) for extent in message.credits if extent.token_count]
        self._stores.credits.settle(settled, full)
        self._stores.credits.settle_partial(message.settled_partial_reserves, partial)

    def _handle_conflicts(self, message: pb.AttachResponse) -> None:
        if message.HasField("conflicts"):
            self._counters.set(SPEC_CONFLICTS, len(message.conflicts.conflicts))
        for conflict in message.conflicts.conflicts:
            logger.warning(
                "shares nothing with instance %s, which also serves %s: %s is %s here and %s there",
                conflict.instance_id,
                conflict.model_name,
                conflict.field,
                conflict.own_value,
                conflict.other_value,
            )
