"""vLLM's KV events for what is stored: routers that subscribe to them learn that the node has a block too."""

from __future__ import annotations

from lmkv_client.connector.vllm_api import (
    MEDIUM_CPU,
    BlockStored,
    Request,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)


class BlockEvents:
    """The stored blocks of one engine, named as vLLM names its own: by block, with the same hashes, on medium `CPU`.

    Only requests that are followed have events. A node reports evictions to its coordinator and not to the engine:
    there are no events for removed blocks.
    """

    def __init__(self, *, block_size: int, chunk_size: int) -> None:
        self._block_size = block_size
        self._chunk_size = chunk_size
        self._requests: dict[str, Request] = {}
        self._stored: list[BlockStored] = []

    def follow(self, request: Request) -> None:
        """Creates events for the chunks of this request from now on."""
        self._requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """Ends the events of a finished request. Events that exist may still be added."""
        self._requests.pop(request_id, None)

    def of_chunk(self, request_id: str, index: int) -> BlockStored | None:
        """The event of storing a full chunk; None if the request is not followed, or no block ends in the chunk.

        A block that begins in the previous chunk is complete now: that chunk was stored, or held, before this one.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        size = self._block_size
        blocks = range(index * self._chunk_size // size, (index + 1) * self._chunk_size // size)
        if not blocks:
            return None
        hashes = [
            maybe_convert_block_hash(hash_) for hash_ in request.block_hashes[max(0, blocks.start - 1) : blocks.stop]
        ]
        parent = hashes.pop(0) if blocks.start else None
        extras = [generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)[0] for at in blocks]
        lora = request.lora_request
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[blocks.start * size : blocks.stop * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extras),
            group_idx=0,
        )

    def add(self, event: BlockStored) -> None:
        """Publishes the event of a committed chunk."""
        self._stored.append(event)

    def take(self) -> list[BlockStored]:
        """Events since the last call."""
        stored, self._stored = self._stored, []
        return stored
