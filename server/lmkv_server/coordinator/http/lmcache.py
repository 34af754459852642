"""LMCache's HTTP paths, with the shapes that its users know, over the handlers that gRPC calls.

Nothing is decided here: each path turns its body into a request of an RPC, and the answer back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2

from lmkv.errors import BadSelection, InstanceNotFound, OperationNotFound
from lmkv.tiers import parse_tier
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv_server.coordinator.http.gateway import call
from lmkv_server.coordinator.http.paths import Body, Path
from lmkv_server.coordinator.http.replies import CallAborted, to_json
from lmkv_server.coordinator.http.tokens import token_array
from lmkv_server.coordinator.services.services import Services

CLEAR_WAIT_SECONDS = 10.0
"""Most time that `/clear` waits, so as to say how much was cleared; the operation goes on after that."""
MAX_PAGE = 1_000
HEALTHY, SILENT = 0, -1
"""Error codes of `/health`: the node reports, or is registered and has yet to report what it holds."""

TokenIds = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0}})
]
"""Left as text, for `token_array` to read."""


class Prompt(Body):
    """Names a prompt's chunks; all but `tokens` is for fleets of several models or tenants."""

    tokens: TokenIds = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))
    model_name: str = ""
    cache_salt: str = ""
    lora_name: str = ""

    def named(self) -> dict[str, Any]:
        """The fields by which requests name chunks."""
        return {
            "tokens": token_array(self.tokens).tolist(),
            "model_name": self.model_name,
            "cache_salt": self.cache_salt,
            "lora_name": self.lora_name,
        }


class LookupBody(Prompt, kw_only=True):
    """Body of `/lookup`."""

    tokens: TokenIds


class MoveBody(Prompt, kw_only=True):
    """Body of `/move`. A position is `[instance_id, location]`. LMCache says `should_copy`, its manual `copy`."""

    old_position: tuple[str, str]
    new_position: tuple[str, str]
    copy: bool | None = None
    should_copy: bool | None = None
    request_id: str = ""


class ClearBody(Prompt, kw_only=True):
    """Body of `/clear`. Without a location every tier is cleared, without tokens all that it holds."""

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


def paths(services: Services) -> dict[str, Path[Any]]:
    """LMCache's paths by name."""
    acts = _Acts(services)
    layout = {"node-1": ["LocalCPUBackend", 12]}
    move = "move-18af3c5d2e9b7f01"
    pin = "node-1/4f1d0c2b9a7e6835"
    return {
        "/lookup": Path(
            LookupBody,
            "Find how much of a prompt each instance holds.",
            acts.lookup,
            {**layout, "event_id": "lookup-7d9f...", "layout_info": layout},
        ),
        "/move": Path(
            MoveBody,
            "Move or copy a prompt's chunks; /check_finish follows it.",
            acts.move,
            {"event_id": move, "num_tokens": 12},
        ),
        "/clear": Path(
            ClearBody,
            "Make an instance forget chunks.",
            acts.clear,
            {"event_id": "clear-18af3c5d2e9b7f01", "num_tokens": 12},
        ),
        "/pin": Path(
            PinBody,
            "Keep a prompt's chunks from eviction for a while.",
            acts.pin,
            {"event_id": pin, "num_tokens": 12, "expire_time": "2030-01-01T00:05:00Z"},
        ),
        "/unpin": Path(UnpinBody, "End a pin early.", acts.unpin, {"event_id": pin}),
        "/health": Path(
            InstanceBody,
            "Ask whether an instance reports.",
            acts.health,
            {"event_id": "health-7d9f...", "error_codes": {"0": 0}},
        ),
        "/check_finish": Path(
            EventBody,
            "Ask how far an event is: running, done, failed or cancelled.",
            acts.event,
            {"status": "done", "num_tokens": 12},
        ),
        "/query_instance": Path(
            AddressBody,
            "Find the instance at an address.",
            acts.instance_at,
            {"event_id": "query-7d9f...", "res": "node-1"},
        ),
        "/query_worker_info": Path(
            WorkersBody,
            "List the workers of one instance, or of all.",
            acts.workers,
            {"event_id": "query-7d9f...", "worker_infos": []},
        ),
    }


class _Acts:
    """What each path does."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def lookup(self, body: LookupBody) -> dict[str, Any]:
        response = await self._services.cache.lookup_tokens(
            token_array(body.tokens),
            model_name=body.model_name,
            cache_salt=body.cache_salt,
            lora_name=body.lora_name,
        )
        # As LMCache has it: where the matched prefix ends, and its length.
        layout = {
            holder.instance_id: [holder.runs[-1].location, holder.matched_token_count] for holder in response.holders
        }
        # LMCache's code nests the layout, its manual does not; an instance cannot take the place of another field.
        return {**layout, "event_id": _event_id("lookup"), "layout_info": layout}

    async def move(self, body: MoveBody) -> dict[str, Any]:
        wishes = {wish for wish in (body.copy, body.should_copy) if wish is not None}
        if len(wishes) > 1:
            raise BadSelection("copy and should_copy contradict each other; set one of the two")
        operation = await self._call(
            self._services.cache.Move,
            pb.MoveRequest(
                old_position=_position(*body.old_position),
                new_position=_position(*body.new_position),
                copy=wishes == {True},
                request_id=body.request_id,
                **body.named(),
            ),
        )
        return {"event_id": operation.name, "num_tokens": _token_count(operation)}

    async def clear(self, body: ClearBody) -> dict[str, Any]:
        if not body.instance_id:
            raise BadSelection("instance_id is empty; name the instance that shall forget")
        named = body.named()
        request = pb.ClearRequest(
            instance_id=body.instance_id,
            tier=parse_tier(body.location) if body.location else chunk_pb2.TIER_UNSPECIFIED,
            **named,
            all=not (named["tokens"] or named["model_name"]),
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
        request = pb.PinRequest(position=position, **body.named())
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
            raise BadSelection("name one pin: event_id is what /pin answered")
        (pin_id,) = pin_ids
        await self._call(self._services.cache.Unpin, pb.UnpinRequest(pin_id=pin_id))
        return {"event_id": pin_id}

    async def health(self, body: InstanceBody) -> dict[str, Any]:
        (instance,) = await self._instances(body.instance_id)
        return {"event_id": _event_id("health"), "error_codes": {"0": HEALTHY if instance.synced else SILENT}}

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
        host = body.ip.strip("[]")
        for instance in await self._instances():
            if instance.peer_address and instance.peer_address.rpartition(":")[0].strip("[]") == host:
                return {"event_id": body.event_id or _event_id("query"), "res": instance.instance_id}
        raise InstanceNotFound(f"no instance is at {body.ip[:100]!r}; /query_worker_info lists them", ip=body.ip[:100])

    async def workers(self, body: WorkersBody) -> dict[str, Any]:
        """One worker an instance: one node serves all ranks."""
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
        """All instances, or the one with this id. Raises `InstanceNotFound` that names those there are."""
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
        """Whether it is a pin in force. Raises `OperationNotFound` if it has a pin's form but is gone."""
        instance_id, slash, _ = event_id.rpartition("/")
        if not slash:
            return False
        request = pb.ListPinsRequest(instance_id=instance_id, page_size=MAX_PAGE)
        pins = (await self._call(self._services.cache.ListPins, request)).pins
        if event_id not in {pin.pin_id for pin in pins}:
            raise OperationNotFound(f"no pin {event_id[:100]!r} is in force", name=event_id[:100])
        return True


_INSTANT = ("lookup", "health", "query")


def _event_id(kind: str) -> str:
    """A label for what is over once it is answered."""
    return f"{kind}-{uuid.uuid4().hex}"


def _is_instant(event_id: str) -> bool:
    kind, dash, unique = event_id.partition("-")
    return kind in _INSTANT and bool(dash) and len(unique) == 32


def _position(instance_id: str, location: str) -> chunk_pb2.Position:
    return chunk_pb2.Position(instance_id=instance_id, tier=parse_tier(location))


def _set_seconds(duration: duration_pb2.Duration, seconds: float) -> None:
    if not abs(seconds) <= 315_576_000_000:  # what a Duration holds
        raise BadSelection(f"ttl {seconds} is no time in seconds")
    duration.FromNanoseconds(round(seconds * 1e9))


def _details(operation: operations_pb2.Operation) -> Message | None:
    """What an operation has done, or how far it is."""
    for packed, kinds in (
        (operation.response, (pb.MoveResult, pb.ClearResult)),
        (operation.metadata, (pb.MoveProgress, pb.ClearProgress)),
    ):
        for kind in kinds:
            message = kind()
            if packed.Unpack(message):
                return message
    return None


def _token_count(operation: operations_pb2.Operation) -> int:
    """Tokens that it has moved or cleared; those that it shall move while it has not ended."""
    return int(getattr(_details(operation), "token_count", 0))


def _failures(operation: operations_pb2.Operation) -> dict[str, Any]:
    """What it left undone and why, if anything."""
    failures = getattr(_details(operation), "failures", ())
    return {"failures": [to_json(failure) for failure in failures]} if failures else {}


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
