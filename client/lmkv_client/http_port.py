"""Finds the gRPC port of a coordinator from its HTTP port."""

from __future__ import annotations

import http.client
import json
from contextlib import suppress

from lmkv.auth.credentials import Credentials

TIMEOUT_SECONDS = 2.0
MAX_ANSWER_BYTES = 4096


def find_grpc(address: str, credentials: Credentials) -> str:
    """`host:port` of the gRPC service behind a coordinator's HTTP address; empty if no coordinator responds there."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        connection: http.client.HTTPConnection
        if credentials.ca:
            context = credentials.client_contexts().get()
            context.check_hostname = not credentials.name
            connection = http.client.HTTPSConnection(
                host.strip("[]"), int(port), timeout=TIMEOUT_SECONDS, context=context
            )
        else:
            connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/grpc_port")
            answer = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))
            return f"{host}:{int(answer['grpc_port'])}"
        finally:
            connection.close()
    return ""
