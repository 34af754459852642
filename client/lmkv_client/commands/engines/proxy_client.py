"""A client of the proxy's HTTP API for its engines."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from lmkv.auth.credentials import Credentials
from lmkv.errors import ConfigError, LmkvError, Unreachable

REQUEST_SECONDS = 30.0
MAX_ANSWER_BYTES = 16 << 20

Engine = dict[str, Any]
"""The state of an engine, as the proxy lists it."""


class ProxyClient:
    """Calls a proxy, one connection a request."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        """Raises `ConfigError` if the URL is not one of a server."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._host, self._port, scheme = parts.hostname, parts.port, parts.scheme
        except ValueError:
            self._host, self._port, scheme = None, None, ""
        if not self._host or scheme not in ("http", "https"):
            raise ConfigError(f"--proxy must be http://HOST:PORT, not {url!r}")
        self._url = url
        self._credentials = credentials
        self._is_tls = scheme == "https"

    def call(self, method: str, path: str, body: object = None) -> list[Engine]:
        """The engines after the call. Raises `Unreachable`, or `LmkvError` with the proxy's reason."""
        assert self._host is not None
        connection: http.client.HTTPConnection
        if self._is_tls:
            context = self._credentials.client_contexts().get()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=REQUEST_SECONDS, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=REQUEST_SECONDS)
        headers = {"Content-Type": "application/json", **dict(self._credentials.token.headers())}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
            if response.status == 200:
                engines: list[Engine] = answer["engines"]
                return engines
            reason = answer["error"]["message"]
        except (OSError, http.client.HTTPException) as error:
            fix = "start one with `lmkv proxy`, or name another with --proxy URL"
            raise Unreachable(f"no proxy responds at {self._url}; {fix} ({error})", address=self._url) from None
        except (ValueError, KeyError, TypeError):
            raise LmkvError(f"{self._url} is not a proxy of lmkv that knows {path}") from None
        finally:
            connection.close()
        raise LmkvError(str(reason))
