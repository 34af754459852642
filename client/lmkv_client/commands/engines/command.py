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
from lmkv.cli import Command
from lmkv.config import ClientConfig, load
from lmkv.errors import ConfigError, LmkvError, Unreachable
from lmkv_client.commands import count, read_seconds
from lmkv_client.commands.tables import Number, print_table

EXAMPLES = """\
  lmkv engines                                          list the engines of the proxy at 127.0.0.1:9100
  lmkv engines --proxy http://proxy:9100 --json         of another one, as JSON
  lmkv engines add http://10.0.0.9:8000                 an engine of a proxy in mode route
  lmkv engines add http://10.0.0.9:8000 --role decode   of one in mode pd
  lmkv engines add dns://vllm.default.svc:8000          each address of the name is an engine
  lmkv engines drain http://10.0.0.7:8000               wait until its requests have ended, then stop it
  lmkv engines remove http://10.0.0.7:8000              at once: its requests are repeated on other engines

Changes last until the proxy restarts; a file that `engines_file` of the proxy names is read again after each change. If
the proxy has auth_tokens, set auth_token or auth_token_file to a token of an operator.

exit codes:
  0  done      1  rejected, failed, or not drained in time     2  bad usage     130  interrupted; a drain continues"""

COLUMNS = ("ENGINE", "ROLE", "STATE", Number("IN FLIGHT"), "INSTANCE", "MODELS")
POLL_SECONDS = 0.5
REQUEST_SECONDS = 30.0
MAX_ANSWER_BYTES = 16 << 20

Engine = dict[str, Any]
"""The state of an engine, as the proxy lists it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv engines`."""
    parser.add_argument(
        "action", nargs="?", choices=("list", "add", "drain", "remove"), default="list", help="(default: list)"
    )
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="the engine, as http://HOST:PORT, or dns://NAME:PORT; not for list"
    )
    parser.add_argument(
        "--role", choices=("prefill", "decode", "both"), help="add: what the engine does; needed if the mode is pd"
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=read_seconds,
        default=600.0,
        help="drain: time to wait, after which the drain continues (default: 10m)",
    )
    parser.add_argument("--no-wait", action="store_true", help="drain: return at once")
    parser.add_argument(
        "--proxy",
        metavar="URL",
        default="http://127.0.0.1:9100",
        help="the proxy (default: http://127.0.0.1:9100)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file to read (default: $LMKV_CONFIG_FILE)")
    parser.add_argument("--json", action="store_true", help="print JSON with the field names of the API")


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
        print_table(COLUMNS, [_row(engine) for engine in engines])
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


def _row(engine: Engine) -> tuple[str, ...]:
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


command = Command(
    name="engines",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
