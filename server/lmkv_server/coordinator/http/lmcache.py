"""LMCache's HTTP paths, with its request and response formats, over the handlers of the gRPC services.

Each path translates its body into the request of an RPC, and the response back.
"""

from __future__ import annotations

import ipaddress
import socket
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2

from lmkv.errors import BadSelection, InstanceNotFound, OperationNotFound
from lmkv.rpc.messages import by_tokens, names_chunks
from lmkv.tiers import DISK, GPU, HOST, LAYOUT_TIERS, REMOTE
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv.v1.prompt_pb2 import PromptSelector
from lmkv_server.coordinator.http.bodies import Body, CallAborted, Path, to_json, token_array
from lmkv_server.coordinator.http.gateway import call
from lmkv_server.coordinator.services.services import Services

TokenIds = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0}})
]
"""Not decoded here: `token_array` reads the text."""


class Prompt(Body):
    """Names a prompt's chunks; `tokens` suffices in a fleet with one model."""

    tokens: TokenIds = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))
    model_name: str = ""
    cache_salt: str = ""
    lora_name: str = ""

    @property
    def selector(self) -> PromptSelector:
        """Returns the selector by which requests of RPCs name the chunks."""
        return by_tokens(
            token_array(self.tokens).tolist(),
            model_name=self.model_name,
            cache_salt=self.cache_salt,
            lora_name=self.lora_name,
        )


class LookupBody(Prompt, kw_only=True):
    tokens: TokenIds


class MoveBody(Prompt, kw_only=True):
    """Body of `/move`. A position is `[instance_id, location]`. LMCache's code has `should_copy`, its manual `copy`."""

    old_position: tuple[str, str]
    new_position: tuple[str, str]
    copy: bool | None = None
    should_copy: bool | None = None
    request_id: str = ""


class ClearBody(Prompt, kw_only=True):
    """Body of `/clear`. Without a location all tiers are cleared, without tokens all chunks."""

    instance_id: str
    location: str = ""


class PinBody(Prompt, kw_only=True):
    """Body of `/pin`. `ttl` is in seconds."""

    instance_id: str
    location: str = "LocalCPUBackend"
    ttl: float | None = None


class UnpinBody(Body):
    """Body of `/unpin`: the `event_id` that `/pin` answered."""

    event_id: str = ""
    pin_id: str = ""


class EventBody(Body):
    """Body of `/check_finish`."""

    event_id: str


class InstanceBody(Body):
    """Body of `/health`."""

    instance_id: str


class AddressBody(Body):
    """Body of `/query_instance`; an `event_id` is echoed."""

    ip: str
    event_id: str = ""


class WorkersBody(Body):
    """Body of `/query_worker_info`; `all` stands for every instance."""

    instance_id: str = "all"
    worker_ids: list[int] | None = None


CLEAR_WAIT_SECONDS = 10.0
"""Longest time that `/clear` waits for the result; the operation continues afterwards."""
MAX_PAGE = 1_000
LOCATIONS: Mapping[str, str] = {
    GPU: "GPU",
    HOST: "LocalCPUBackend",
    DISK: "LocalDiskBackend",
    REMOTE: "RemoteBackend",
}
"""LMCache's names of tiers."""
HEALTHY, UNSYNCED = 0, -1
"""Error codes of `/health`: the instance is synced, or has yet to report its snapshot."""


def paths(services: Services) -> dict[str, Path[Any]]:
    """LMCache's paths."""
    handlers = _Handlers(services)
    layout = {"node-1": ["LocalCPUBackend", 12]}
    move = "move-18af3c5d2e9b7f01"
    pin = "node-1/4f1d0c2b9a7e6835"
    return {
        "/lookup": Path(
            LookupBody,
            "Find how much of a prompt each instance holds.",
            handlers.lookup,
            {**layout, "event_id": "lookup-7d9f...", "layout_info": layout},
        ),
        "/move": Path(
            MoveBody,
            "Move or copy a prompt's chunks; /check_finish follows it.",
            handlers.move,
            {"event_id": move, "num_tokens": 12},
        ),
        "/clear": Path(
            ClearBody,
            "Drop chunks of an instance.",
            handlers.clear,
            {"event_id": "clear-18af3c5d2e9b7f01", "num_tokens": 12},
        ),
        "/pin": Path(
            PinBody,
            "Protect a prompt's chunks from eviction for a time.",
            handlers.pin,
            {"event_id": pin, "num_tokens": 12, "expire_time": "2030-01-01T00:05:00Z"},
        ),
        "/unpin": Path(UnpinBody, "End a pin early.", handlers.unpin, {"event_id": pin}),
        "/health": Path(
            InstanceBody,
            "Check whether an instance reports.",
            handlers.health,
            {"event_id": "health-7d9f...", "error_codes": {"0": 0}},
        ),
        "/check_finish": Path(
            EventBody,
            "State of an event: running, done, failed or cancelled.",
            handlers.event,
            {"status": "done", "num_tokens": 12},
        ),
        "/query_instance": Path(
            AddressBody,
            "Find the instance at an address.",
            handlers.instance_at,
            {"event_id": "query-7d9f...", "res": "node-1"},
        ),
        "/query_worker_info": Path(
            WorkersBody,
            "List the workers of one instance, or of all.",
            handlers.workers,
            {"event_id": "query-7d9f...", "worker_infos": []},
        ),
    }


class _Handlers:
    """The handler of each path."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def lookup(self, body: LookupBody) -> dict[str, Any]:
        response = await self._services.cache.lookup_tokens(
            token_array(body.tokens),
            model_name=body.model_name,
            cache_salt=body.cache_salt,
            lora_name=body.lora_name,
        )
        # LMCache's format: location of the end of the matched prefix, and its length.
        layout = {
            holder.instance_id: [LOCATIONS[holder.runs[-1].tier], holder.matched_token_count]
            for holder in response.holders
        }
        # LMCache's code nests the layout, its manual does not; the fixed fields override instances of the same name.
        return {**layout, "event_id": _event_id("lookup"), "layout_info": layout}

    async def move(self, body: MoveBody) -> dict[str, Any]:
        values = {value for value in (body.copy, body.should_copy) if value is not None}
        if len(values) > 1:
            raise BadSelection("copy and should_copy contradict each other; set one of the two")
        operation = await self._call(
            self._services.cache.Move,
            pb.MoveRequest(
                prompt=body.selector,
                old_position=_position(*body.old_position),
                new_position=_position(*body.new_position),
                copy=values == {True},
                request_id=body.request_id,
            ),
        )
        return {"event_id": operation.name, "num_tokens": _token_count(operation)}

    async def clear(self, body: ClearBody) -> dict[str, Any]:
        if not body.instance_id:
            raise BadSelection("instance_id is empty; name the instance to clear")
        prompt = body.selector
        names_prompt = names_chunks(prompt)
        request = pb.ClearRequest(
            prompt=prompt if names_prompt else None,
            instance_id=body.instance_id,
            tier=_tier(body.location),
            model_name="" if names_prompt else body.model_name,
            all=not (names_prompt or body.model_name),
        )
        operation = await self._call(self._services.cache.Clear, request)
        timeout = duration_pb2.Duration(seconds=int(CLEAR_WAIT_SECONDS))
        operation = await self._call(
            self._services.operations.WaitOperation,
            operations_pb2.WaitOperationRequest(name=operation.name, timeout=timeout),
        )
        if operation.HasField("error"):
            raise CallAborted(operation.error)
        return {"event_id": operation.name, "num_tokens": _token_count(operation), **_failures(operation)}

    async def pin(self, body: PinBody) -> dict[str, Any]:
        position = _position(body.instance_id, body.location)
        request = pb.PinRequest(prompt=body.selector, position=position)
        if body.ttl is not None:
            _set_seconds(request.ttl, body.ttl)
        pin = (await self._call(self._services.cache.Pin, request)).pin
        return {
            "event_id": pin.pin_id,
            "num_tokens": pin.token_count,
            "expire_time": pin.expire_time.ToJsonString(),
        }

    async def unpin(self, body: UnpinBody) -> dict[str, Any]:
        pin_ids = {pin_id for pin_id in (body.event_id, body.pin_id) if pin_id}
        if len(pin_ids) != 1:
            raise BadSelection("name one pin: event_id is the one that /pin returned")
        (pin_id,) = pin_ids
        await self._call(self._services.cache.Unpin, pb.UnpinRequest(pin_id=pin_id))
        return {"event_id": pin_id}

    async def health(self, body: InstanceBody) -> dict[str, Any]:
        (instance,) = await self._instances(body.instance_id)
        return {"event_id": _event_id("health"), "error_codes": {"0": HEALTHY if instance.synced else UNSYNCED}}

    async def event(self, body: EventBody) -> dict[str, Any]:
        event_id = body.event_id
        if _is_instant(event_id) or await self._is_pin(event_id):
            return {"status": "done"}
        operation = await self._call(
            self._services.operations.GetOperation, operations_pb2.GetOperationRequest(name=event_id)
        )
        if not operation.done:
            return {"status": "running", "num_tokens": _token_count(operation)}
        if operation.HasField("error"):
            status = "cancelled" if operation.error.code == code_pb2.CANCELLED else "failed"
            return {"status": status, "detail": operation.error.message}
        return {"status": "done", "num_tokens": _token_count(operation), **_failures(operation)}

    async def instance_at(self, body: AddressBody) -> dict[str, Any]:
        wanted = body.ip.strip("[]")
        for instance in await self._instances():
            host = instance.peer_address.rpartition(":")[0].strip("[]")
            if host == wanted or (host and _is_here(host) and _is_here(wanted)):
                return {"event_id": body.event_id or _event_id("query"), "res": instance.instance_id}
        raise InstanceNotFound(f"no instance is at {body.ip[:100]!r}; /query_worker_info lists them", ip=body.ip[:100])

    async def workers(self, body: WorkersBody) -> dict[str, Any]:
        """One worker per instance: a node serves all ranks."""
        instances = await self._instances("" if body.instance_id == "all" else body.instance_id)
        is_wanted = body.worker_ids is None or 0 in body.worker_ids
        lease_ttl = self._services.core.instances.lease_ttl
        return {
            "event_id": _event_id("query"),
            "worker_infos": [_worker(instance, lease_ttl) for instance in instances if is_wanted],
        }

    async def _call(self, handler: Callable[[Any, Any], Any], request: Message) -> Any:
        return await call(handler, request)

    async def _instances(self, instance_id: str = "") -> list[registry_pb.Instance]:
        """All instances, or the instance with this id. Raises `InstanceNotFound`."""
        if instance_id:
            self._services.core.instances.named(instance_id, "instance_id")
        found: list[registry_pb.Instance] = []
        request = registry_pb.ListInstancesRequest(page_size=MAX_PAGE)
        while True:
            page = await self._call(self._services.registry.ListInstances, request)
            found += page.instances
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        return [instance for instance in found if instance_id in ("", instance.instance_id)]

    async def _is_pin(self, event_id: str) -> bool:
        """Whether it is an active pin. Raises `OperationNotFound` if it has the form of a pin id but is not active."""
        instance_id, slash, _ = event_id.rpartition("/")
        if not slash:
            return False
        request = pb.ListPinsRequest(instance_id=instance_id, page_size=MAX_PAGE)
        pins = (await self._call(self._services.cache.ListPins, request)).pins
        if event_id not in {pin.pin_id for pin in pins}:
            raise OperationNotFound(f"no pin {event_id[:100]!r} is active", name=event_id[:100])
        return True


_INSTANT = ("lookup", "health", "query")


def _is_here(host: str) -> bool:
    """Whether this is an address of the coordinator's own machine: all of them name one host."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return not address.is_unspecified


def _event_id(kind: str) -> str:
    """An id for an event that is done when it is answered."""
    return f"{kind}-{uuid.uuid4().hex}"


def _is_instant(event_id: str) -> bool:
    kind, dash, unique = event_id.partition("-")
    return kind in _INSTANT and bool(dash) and len(unique) == 32


def _position(instance_id: str, location: str) -> chunk_pb2.Position:
    return chunk_pb2.Position(instance_id=instance_id, tier=_tier(location))


def _tier(location: str) -> str:
    """The tier of a location, named as LMCache or lmkv does, in any case; an unknown name is one for the services."""
    names = {name.lower(): tier for tier, name in LOCATIONS.items()} | {tier: tier for tier in LAYOUT_TIERS}
    return names.get(location.lower(), location)


def _set_seconds(duration: duration_pb2.Duration, seconds: float) -> None:
    if not abs(seconds) <= 315_576_000_000:  # the range of Duration
        raise BadSelection(f"ttl {seconds} is not a valid number of seconds")
    duration.FromNanoseconds(round(seconds * 1e9))


def _details(operation: operations_pb2.Operation) -> Message | None:
    """The result of an operation, or its progress."""
    for packed, kinds in (
        (operation.response, (pb.MoveResult, pb.ClearResult, pb.DrainResult)),
        (operation.metadata, (pb.MoveProgress, pb.ClearProgress, pb.DrainProgress)),
    ):
        for kind in kinds:
            message = kind()
            if packed.Unpack(message):
                return message
    return None


def _token_count(operation: operations_pb2.Operation) -> int:
    """Tokens that it moved or cleared; while it runs, tokens to move."""
    return int(getattr(_details(operation), "token_count", 0))


def _failures(operation: operations_pb2.Operation) -> dict[str, Any]:
    failures = getattr(_details(operation), "failures", ())
    return {"failures": [_with_packed_keys(to_json(failure)) for failure in failures]} if failures else {}


def _with_packed_keys(failure: dict[str, Any]) -> dict[str, Any]:
    """A failure, or those of an instance, whose keys are one string here."""
    if keys := failure.get("chunkKeys"):
        failure["chunkKeys"] = b64encode(b"".join(map(b64decode, keys))).decode()
    for part in failure.get("failures", ()):
        _with_packed_keys(part)
    return failure


def _worker(instance: registry_pb.Instance, lease_ttl: float) -> dict[str, Any]:
    host, _, port = instance.peer_address.rpartition(":")
    return {
        "instance_id": instance.instance_id,
        "worker_id": 0,
        "ip": host.strip("[]"),
        "port": int(port or 0),
        "peer_init_url": instance.peer_address,
        "registration_time": instance.register_time.ToNanoseconds() / 1e9,
        "last_heartbeat_time": instance.expire_time.ToNanoseconds() / 1e9 - lease_ttl,
    }
