"""The client of an engine, the proxy or a node over HTTPS, with a token."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lmkv.errors import Unreachable
from lmkv_client.demo.endpoint import Endpoint
from tests.support.certificates import Certificates, issue


class Handler(BaseHTTPRequestHandler):
    """Answers with the token that it was shown, as the value of a metric."""

    def do_GET(self) -> None:
        shown = self.headers.get("Authorization", "none").removeprefix("Bearer ")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f'shown{{token="{shown}"}} 1\n'.encode())

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return issue(tmp_path)


@pytest.fixture
def port(certificates: Certificates) -> Iterator[int]:
    """The port of a server that accepts only clients with a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    context.load_cert_chain(certificates.cert, certificates.key)
    context.verify_mode = ssl.CERT_REQUIRED
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_an_endpoint_with_certificate_and_token_shows_both(port: int, certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=certificates.ca)
    context.load_cert_chain(certificates.cert, certificates.key)
    assert Endpoint("node", port, "", tls=context, token="secret").metrics(token="secret") == {"shown": 1.0}
    assert Endpoint("node", port, "", tls=context).metrics(token="none") == {"shown": 1.0}


def test_an_endpoint_without_the_issuer_does_not_reach_a_server_with_tls(port: int) -> None:
    for tls in (None, ssl.create_default_context()):
        with pytest.raises(Unreachable):
            Endpoint("node", port, "", tls=tls).metrics()
