"""`envoy.service.ext_proc.v3.ExternalProcessor`: a stream for each HTTP request of the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from typing import Any

import msgspec

from lmkv import errors
from lmkv.auth.caller import client_identity
from lmkv.auth.credentials import HEADER
from lmkv.config import PickerConfig
from lmkv.ext_proc.external_processor_pb2 import (
    ProcessingRequest,
    ProcessingResponse,
    ServiceUnavailable,
    TooManyRequests,
)
from lmkv.ext_proc.external_processor_pb2_grpc import ExternalProcessorServicer
from lmkv.runtime.memory_budget import Lease, of_process
from lmkv.runtime.places import Places, most_of, requester
from lmkv_server.http.guard import BodyTooLarge
from lmkv_server.proxy.client_salts import Client, ClientSalts, NotAdmitted
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.engines import Endpoints
from lmkv_server.proxy.metrics import PickerMetrics
from lmkv_server.proxy.passthrough import UNCACHED
from lmkv_server.proxy.picker.exchange import Exchange
from lmkv_server.proxy.picker.selection import ArrivingBody, EnginePicker, address_of, prompt_of
from lmkv_server.proxy.routing.health import NoHealthyEngine

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS", "DELETE")


class ExternalProcessorService(ExternalProcessorServicer):
    """Answers at most `max_concurrent_requests` streams at a time, each for at most `request_timeout`.

    Gateways have shares of the limit. A stream whose request is not complete gives way to others; see `Places`.
    """

    def __init__(
        self,
        picker: EnginePicker,
        endpoints: Endpoints,
        metrics: PickerMetrics,
        salts: ClientSalts,
        config: PickerConfig,
    ) -> None:
        self._picker = picker
        self._endpoints = endpoints
        self._metrics = metrics
        self._salts = salts
        limit = config.max_concurrent_requests
        self._places = Places[asyncio.Timeout]("concurrent requests", limit, most_of(limit))
        self._timeout_seconds = config.request_timeout
        self._max_body_bytes = config.max_body_bytes

    async def Process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: Any
    ) -> AsyncIterator[ProcessingResponse]:
        caller = client_identity(context)
        requester.set(caller)
        body = self._picker.arriving(caller, looks_ahead=not self._salts.are_derived)
        load, admitted = ExitStack(), ExitStack()
        exchange = Exchange(self._max_body_bytes, body.add)
        held_bytes = 0
        lease = admitted.enter_context(Lease(of_process(), caller))
        self._metrics.stream_count += 1
        try:
            async with asyncio.timeout(self._timeout_seconds) as deadline:
                admitted.callback(self._places.release, deadline)
                refusal = self._take_place(deadline, caller)
                async for message in request_iterator:
                    begin = time.perf_counter()
                    if refusal:
                        self._metrics.requests.labels("rejected").inc()
                        yield exchange.refuse(TooManyRequests, refusal)
                        return
                    await body.wait_for_part()
                    for response in exchange.receive(message):
                        yield response
                    held_bytes = self._count_held(exchange, body, held_bytes)
                    try:
                        await self._hold(lease, exchange, body, held_bytes)
                    except errors.TooManyRequests:
                        self._metrics.requests.labels("rejected").inc()
                        yield exchange.refuse(
                            TooManyRequests, "the bodies of the requests in flight take too much memory"
                        )
                        return
                    if exchange.is_waiting:
                        self._places.settle(deadline)
                        for response in await self._pick(begin, exchange, body, load, admitted):
                            yield response
                        body.clear()
                        held_bytes = self._count_held(exchange, body, held_bytes)
                        await lease.acquire(held_bytes)
                    if exchange.served:
                        self._count_at(exchange.served, load)
                        exchange.served = ""
                    if exchange.is_over:
                        load.close()
        except TimeoutError:
            self._metrics.requests.labels("timeout").inc()
        finally:
            body.clear()
            load.close()
            admitted.close()
            self._metrics.held_bytes -= held_bytes
            self._metrics.stream_count -= 1

    def _take_place(self, deadline: asyncio.Timeout, client: str) -> str:
        """Takes a place for a stream, which the stream that has waited longest for its request may lose by that.

        Returns why there is none.
        """
        try:
            lost = self._places.take(deadline, client, waits=True)
        except errors.Full as error:
            return f"{error} (max_concurrent_requests)"
        if lost is not None and not lost.expired():
            lost.reschedule(asyncio.get_running_loop().time())
        return ""

    async def _pick(
        self, begin: float, exchange: Exchange, body: ArrivingBody, load: ExitStack, admitted: ExitStack
    ) -> Iterable[ProcessingResponse]:
        """The answers to the message that arrived at `begin`. `body` has taken the parts that it came in."""
        try:
            client = admitted.enter_context(self._salts.client(exchange.headers))
            if exchange.has_body:
                body.check_values()
            async with body.turn():
                salted = _salted(client, exchange)
                known = body if salted is None and exchange.has_body else salted
                prompt = prompt_of(exchange.path, known)
            headers = client.headers(exchange.headers)
            early = body.early if known is body else None
            picked = await self._picker.pick(prompt, headers, early, exchange.subset)
        except NotAdmitted as error:
            self._metrics.requests.labels("refused").inc()
            return [exchange.refuse(error.status, str(error), error.headers)]
        except BodyTooLarge as error:
            self._metrics.requests.labels("refused").inc()
            return [exchange.refuse(413, f"the body has {error}", {})]
        except NoHealthyEngine:
            self._metrics.requests.labels("no_endpoint").inc()
            return [exchange.refuse(ServiceUnavailable, "no engine is available to serve the request")]
        self._metrics.pick_seconds.observe(time.perf_counter() - begin)
        self._metrics.requests.labels("picked").inc()
        load.enter_context(picked.engine.count_request(picked.uncached_count))
        changed = {HEADER: headers.get(HEADER, "")} if headers.get(HEADER) != exchange.headers.get(HEADER) else {}
        return exchange.pick(address_of(picked.engine), body=salted, headers=changed)

    async def _hold(self, lease: Lease, exchange: Exchange, body: ArrivingBody, held_bytes: int) -> None:
        """Takes memory for what an exchange holds, and for what its body is decoded to. Raises `TooManyRequests`."""
        if exchange.is_waiting and exchange.has_body:
            await lease.acquire(held_bytes + body.decoded_bytes)
        elif held_bytes > lease.size_bytes:
            lease.grow(held_bytes - lease.size_bytes)

    def _count_held(self, exchange: Exchange, body: ArrivingBody, before_bytes: int) -> int:
        """Counts what an exchange and its body hold now instead of before. Returns it."""
        held_bytes = exchange.held_bytes + body.size_bytes
        self._metrics.held_bytes += held_bytes - before_bytes
        return held_bytes

    def _count_at(self, endpoint: str, load: ExitStack) -> None:
        """Counts the request at the engine that serves it: the gateway may have tried another one."""
        serving: Engine | None = next((one for one in self._endpoints.engines if address_of(one) == endpoint), None)
        if serving is not None:
            load.close()
            load.enter_context(serving.count_request())


def _salted(client: Client, exchange: Exchange) -> bytes | None:
    """The request's body with the client's salt; None if it stays as it is. Raises `NotAdmitted`.

    A request whose body is not known is refused: it could carry the salt of another client.
    """
    if client.salts is None or exchange.headers.get(":method") in _WITHOUT_BODY or exchange.path in UNCACHED:
        return None
    if exchange.body is None:
        if exchange.is_too_large:
            raise NotAdmitted(413, "the body is larger than the picker's max_body_size")
        raise NotAdmitted(400, "the request has no body, or the gateway does not send bodies to the picker")
    try:
        body = msgspec.json.decode(exchange.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAdmitted(400, f"the body must be a JSON object: {error}") from None
    return msgspec.json.encode(client.salted(exchange.path, body))
