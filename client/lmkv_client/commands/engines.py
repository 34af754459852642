"""`lmkv engines`: lists, adds, drains and removes the engines of a proxy, over its HTTP API."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from lmkv.auth.credentials import Credentials
from lmkv.config import ClientConfig, load
from lmkv.errors import ConfigError, LmkvError, Unreachable
from lmkv_client.commands.output import Number, count, print_table

ENGINE_COLUMNS = ("ENGINE", "ROLE", "STATE", Number("IN FLIGHT"), "INSTANCE", "MODELS")
POLL_SECONDS = 0.5
REQUEST_SECONDS = 30.0
MAX_ANSWER_BYTES = 16 << 20

Engine = dict[str, Any]
"""The state of an engine, as the proxy lists it."""


def run(args: argparse.Namespace) -> int:
    """Runs the action, and prints the engines. Raises `ConfigError` if the URL is missing or not allowed."""
    if args.action == "list" and args.url:
        raise ConfigError("`lmkv engines list` takes no URL; it lists all engines")
    if args.action != "list" and not args.url:
        raise ConfigError(f"`lmkv engines {args.action}` needs the URL of an engine; `lmkv engines` lists them")
    if args.role and args.action != "add":
        raise ConfigError("--role is for `lmkv engines add`")
    proxy = ProxyClient(args.proxy, load(ClientConfig, file=args.config, flags={}).credentials)
    if args.action == "list":
        engines = proxy.call("GET", "/engines")
    else:
        body = {"url": args.url} | ({"role": args.role} if args.role else {})
        engines = proxy.call("POST", f"/engines/{args.action}", body)
    if args.action == "drain" and not args.no_wait:
        engines = _wait(proxy, args.url, engines, args.timeout)
    if args.json:
        print(json.dumps({"engines": engines}, indent=2))
    elif engines:
        print_table(ENGINE_COLUMNS, [engine_row(engine) for engine in engines])
    else:
        print("the proxy has no engine; `lmkv engines add URL` adds one")
    return 0


def _wait(proxy: ProxyClient, url: str, engines: list[Engine], timeout_seconds: float) -> list[Engine]:
    """Waits until the engines that `url` stands for have left. Prints the number of their requests as it changes."""
    deadline = time.monotonic() + timeout_seconds
    is_name = url.startswith("dns")
    draining = {
        engine["url"] for engine in engines if engine["state"] == "draining" and (is_name or _same(engine["url"], url))
    }
    shown = ""
    try:
        while left := _left(engines, draining):
            requests = sum(engine["in_flight_count"] for engine in left)
            text = (
                f"{url}: {count(requests, 'request')} in flight" if requests else f"{url}: a handoff is not loaded yet"
            )
            if text != shown:
                shown = text
                print(text, file=sys.stderr)
            if time.monotonic() >= deadline:
                raise LmkvError(f"{text} after {timeout_seconds:g} s; the drain continues, `lmkv engines` shows it")
            time.sleep(POLL_SECONDS)
            engines = proxy.call("GET", "/engines")
    except KeyboardInterrupt:
        print(f"the drain of {url} continues; `lmkv engines` shows it", file=sys.stderr)
        raise
    if left := [engine for engine in engines if engine["url"] in draining]:
        raise LmkvError(f"{left[0]['url']} was added again before it was drained")
    print(f"{url}: drained, safe to stop", file=sys.stderr)
    return engines


def _left(engines: list[Engine], draining: Collection[str]) -> list[Engine]:
    return [engine for engine in engines if engine["url"] in draining and engine["state"] == "draining"]


def _same(engine_url: str, given: str) -> bool:
    return engine_url == (given if "://" in given else f"http://{given}").rstrip("/")


def engine_row(engine: Engine) -> tuple[str, ...]:
    """The table row of an engine."""
    state = engine["state"] + (f": {engine['failure']}" if engine["failure"] else "")
    models = ", ".join(engine["models"])
    return (engine["url"], engine["role"], state, str(engine["in_flight_count"]), engine["instance_id"], models)


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
        """The engines after the call. Raises as `answer`."""
        engines: list[Engine] = self.answer(method, path, body)["engines"]
        return engines

    def answer(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The answer to a call, which has `engines`.

        Raises `Unreachable`, or `LmkvError` with the proxy's reason.
        """
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
                return {**answer, "engines": list(answer["engines"])}
            reason = answer["error"]["message"]
        except (OSError, http.client.HTTPException) as error:
            fix = "start one with `lmkv proxy`, or name another with --proxy URL"
            raise Unreachable(f"no proxy responds at {self._url}; {fix} ({error})", address=self._url) from None
        except (ValueError, KeyError, TypeError):
            raise LmkvError(f"{self._url} is not a proxy of lmkv that knows {path}") from None
        finally:
            connection.close()
        raise LmkvError(str(reason))
