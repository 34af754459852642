"""The names of vLLM that only the connector of the encoder cache imports; `vllm_api` has the others.

| name | from (under `vllm`) | for |
|---|---|---|
| `ECConnectorBase`, `ECConnectorRole`, `ECConnectorMetadata`, `ECConnectorWorkerMetadata` | \
`distributed.ec_transfer.ec_connector.base` | the connector and its messages |
| `ECConnectorStats`, `ECConnectorPromMetrics` | `distributed.ec_transfer.ec_connector.metrics` | statistics |
| `ECConnectorOutput` | `v1.outputs` | the workers' reports |

All are in vLLM 0.32 and later.
"""

from __future__ import annotations

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput

__all__ = [
    "ECConnectorBase",
    "ECConnectorMetadata",
    "ECConnectorOutput",
    "ECConnectorPromMetrics",
    "ECConnectorRole",
    "ECConnectorStats",
    "ECConnectorWorkerMetadata",
]
