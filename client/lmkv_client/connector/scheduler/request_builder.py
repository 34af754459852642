"""Makes the state of a request from vLLM's request: the keys of its chunks and its part in a handoff."""

from __future__ import annotations

from lmkv.config import ConnectorConfig
from lmkv.errors import LmkvError
from lmkv.keys import as_tokens
from lmkv.spec import KvSpec
from lmkv.telemetry.spans import TRACEPARENT
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.adapters import Adapter, Adapters
from lmkv_client.connector.misses import Beginnings
from lmkv_client.connector.multimodal import MediaDigests
from lmkv_client.connector.scheduler.handoff import HandoffParams
from lmkv_client.connector.scheduler.request_state import RequestState
from lmkv_client.connector.vllm_api import Request, init_logger
from lmkv_client.engine.attachment import Send
from lmkv_client.engine.key_space import KeySpace
from lmkv_client.engine.served_names import ServedNames

logger = init_logger("vllm.lmkv")


class RequestBuilder:
    """Makes request states; announces LoRA adapters to the node with their first request."""

    def __init__(
        self,
        config: ConnectorConfig,
        spec: KvSpec,
        served: ServedNames,
        send: Send,
        adapters: Adapters,
    ) -> None:
        self._config = config
        self.spec = spec
        """Of requests that begin now."""
        self._served = served
        self._send = send
        self._adapters = adapters
        self._beginnings = Beginnings()
        self._media = MediaDigests()

    def build(self, request: Request, handoff: HandoffParams | None) -> RequestState | None:
        """The state of a new request; None if it cannot be cached."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
            return None
        adapter = None
        if request.lora_request is not None and (adapter := self._adapters.of_request(request.lora_request)) is None:
            return None
        try:
            return self._build(request, handoff, adapter)
        except (LmkvError, OSError, ValueError) as error:
            logger.warning("[%s] not cached: %s", request.request_id, error)
            return None

    def _build(self, request: Request, handoff: HandoffParams | None, adapter: Adapter | None) -> RequestState:
        extras = self._media.extras(request.mm_features, self.spec.chunk_size)
        key_space = KeySpace(self.spec, self._config.cluster_secret)
        lora = adapter.identity if adapter else ""
        chain = key_space.chain(salt=request.cache_salt or "", lora=lora, extras=extras)
        if adapter:
            self._announce(adapter)
        config, tokens = self._config, as_tokens(request.prompt_token_ids)
        handed_count = handoff.prompt_token_count or 0 if handoff else 0
        state = RequestState(
            request.request_id,
            tokens[:handed_count] if handed_count else tokens,
            request.all_token_ids,
            chain,
            partial=config.stores_partial_chunks and self.spec.has_plain_parts,
            traceparent=(request.trace_headers or {}).get(TRACEPARENT, ""),
            handoff_id=handoff.handoff_id if handoff and handed_count else "",
            load_timeout=config.pd_load_timeout if handed_count else config.load_timeout,
            may_store=config.stores_chunks or (handoff is not None and handoff.prompt_token_count != 0),
            has_parts=not self.spec.has_plain_parts,
            extras=extras,
            fingerprint=self.spec.fingerprint,
            adapter=adapter,
        )
        first = tokens[: self.spec.chunk_size]
        state.account.seen_elsewhere = self._beginnings.note(
            request.cache_salt or "", first, extras.get(0, b""), chain.root
        )
        return state

    def _announce(self, adapter: Adapter) -> None:
        """Has the node learn of an adapter that is used for the first time, or that has other weights now."""
        model = self._served.use(adapter.name, adapter.identity)
        if model is not None:
            self._send(pb.Act(serve_models=pb.ServeModels(served_models=[model])))
