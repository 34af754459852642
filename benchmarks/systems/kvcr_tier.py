"""KVCR's tier for requests by HTTP: vLLM's server has no field for `kv_hints`, so they come in `kv_transfer_params`.

Engines with KVCR load it by vLLM's `module_path`. All else stays vLLM's and KVCR's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload.tiering.kvcr.manager import KVCRSecondaryTierManager


class HintedKvcrTier(KVCRSecondaryTierManager):  # type: ignore[misc]  # vLLM's classes are Any
    """The tier, with the hints of requests to vLLM's HTTP server."""

    def on_new_request(self, req_context: Any) -> Any:
        """See vLLM, which passes the hints of `AsyncLLM.generate` only."""
        hints = (req_context.kv_transfer_params or {}).get("kv_hints")
        if hints is not None:
            req_context.kv_hints = msgspec.convert(hints, KvHintsEnvelope)
        return super().on_new_request(req_context)
