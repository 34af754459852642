"""The connector of an engine without a GPU that lends its node a buffer all the same: in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkv_client.connector import vllm_connector as connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from lmkv.config import ConnectorConfig


class LMKVConnector(connector.LMKVConnector):
    """Asks for no device."""

    def _lends_buffer(self, config: ConnectorConfig, vllm_config: VllmConfig, rank: int) -> bool:
        return True
