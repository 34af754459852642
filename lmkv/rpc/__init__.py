"""gRPC channels and servers of lmkv, the client of the coordinators, and the mapping between errors and status codes.

`endpoints` opens channels and makes servers; `coordinator_client` is the client of SDK, nodes, proxy and picker;
`interceptor` handles every call of a server; `error_status` maps `lmkv.errors` to `google.rpc.Status` and back. Imports
`lmkv.auth`, `lmkv.telemetry`, `lmkv.runtime` and `lmkv.errors`. Start with `endpoints`.
"""

from lmkv.rpc.endpoints import (
    CHANNEL_OPTIONS,
    MAX_MESSAGE_BYTES,
    PLAINTEXT,
    SERVER_OPTIONS,
    add_port,
    call,
    make_server,
    open_channel,
)
from lmkv.rpc.error_status import DOMAIN, MAX_TEXT, from_rpc_error, from_status, short, to_status

__all__ = [
    "CHANNEL_OPTIONS",
    "DOMAIN",
    "MAX_MESSAGE_BYTES",
    "MAX_TEXT",
    "PLAINTEXT",
    "SERVER_OPTIONS",
    "add_port",
    "call",
    "from_rpc_error",
    "from_status",
    "make_server",
    "open_channel",
    "short",
    "to_status",
]
