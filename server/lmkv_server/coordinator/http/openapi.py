"""The OpenAPI 3.1 description of the HTTP port, generated from the protos' descriptors and the bodies of the paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.rpc import status_pb2

from lmkv import __version__
from lmkv_server.coordinator.http.bodies import Path
from lmkv_server.coordinator.http.gateway import path_of

SUMMARIES = {
    "lmkv.v1.CacheService.Lookup": "Find the instances that hold the beginning of a prompt.",
    "lmkv.v1.CacheService.Explain": "Say why parts of a prompt or of a request are not in the cache.",
    "lmkv.v1.CacheService.Move": "Copy or move chunks from one position to another, as an operation.",
    "lmkv.v1.CacheService.Pin": "Protect chunks from eviction for a time.",
    "lmkv.v1.CacheService.Unpin": "End a pin early.",
    "lmkv.v1.CacheService.ListPins": "List the active pins.",
    "lmkv.v1.CacheService.Hint": "Share, prefetch, pin, retain, demote or evict the chunks of a prompt.",
    "lmkv.v1.CacheService.Clear": "Drop chunks from instances, as an operation.",
    "lmkv.v1.CacheService.Drain": "Copy what only one instance holds to others, as an operation.",
    "lmkv.v1.CacheService.Watch": "Stream changes of the layout map, one JSON object per line or as events.",
    "lmkv.v1.RegistryService.ListInstances": "List the registered instances.",
    "google.longrunning.Operations.ListOperations": "List operations, newest first.",
    "google.longrunning.Operations.GetOperation": "Get the state of an operation.",
    "google.longrunning.Operations.WaitOperation": "Wait until an operation ends, or until the timeout.",
    "google.longrunning.Operations.CancelOperation": "Cancel an operation.",
    "google.longrunning.Operations.DeleteOperation": "Delete an operation that has ended.",
}
"""Summary of each RPC."""
READS = {
    "/metrics": ("probes", "Metrics in Prometheus's text format.", "text/plain"),
    "/history": (
        "page",
        "Samples of the last hour: chunks looked up and found, loads, and bytes per tier; `instance_id` selects one.",
        "application/json",
    ),
    "/healthz": ("probes", "200 while the process is alive.", "application/json"),
    "/readyz": ("probes", "200 once the layout map is complete, otherwise 503 with the reason.", "application/json"),
    "/grpc_port": (
        "probes",
        "The port of the gRPC services.",
        "application/json",
    ),
    "/tokenizers": ("as in vLLM", "The models whose text /tokenize takes.", "application/json"),
}
"""Paths for GET: tag, summary and media type."""

_INTEGER_AS_TEXT = {"type": "string", "pattern": "^-?[0-9]+$"}
_SCALARS: Mapping[int, dict[str, Any]] = {
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    FieldDescriptor.TYPE_DOUBLE: {"type": "number"},
    FieldDescriptor.TYPE_FIXED64: _INTEGER_AS_TEXT,
    FieldDescriptor.TYPE_FLOAT: {"type": "number"},
    FieldDescriptor.TYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.TYPE_INT64: _INTEGER_AS_TEXT,
    FieldDescriptor.TYPE_SFIXED32: {"type": "integer", "format": "int32"},
    FieldDescriptor.TYPE_STRING: {"type": "string"},
    FieldDescriptor.TYPE_UINT32: {"type": "integer", "minimum": 0},
    FieldDescriptor.TYPE_UINT64: _INTEGER_AS_TEXT,
}
"""Schemas of scalars in proto3's JSON."""
_WELL_KNOWN: Mapping[str, dict[str, Any]] = {
    "google.protobuf.Any": {
        "type": "object",
        "properties": {"@type": {"type": "string"}},
        "description": "A message with its type in @type, such as type.googleapis.com/lmkv.v1.MoveResult.",
    },
    "google.protobuf.Duration": {"type": "string", "pattern": r"^-?[0-9]+(\.[0-9]{1,9})?s$"},
    "google.protobuf.Empty": {"type": "object"},
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
}


def document(methods: Iterable[MethodDescriptor], paths: Mapping[str, Path[Any]]) -> dict[str, Any]:
    """The description of RPCs, paths and `READS`."""
    schemas = _Schemas()
    described: dict[str, Any] = {path_of(method): _of_method(method, schemas) for method in methods}
    status = schemas.of_message(status_pb2.Status.DESCRIPTOR)
    described |= {name: _of_path(path) for name, path in paths.items()}
    described |= {name: {"get": _operation(name, *about)} for name, about in READS.items()}
    _, bodies = msgspec.json.schema_components(
        [path.body for path in paths.values()], ref_template="#/components/schemas/{name}"
    )
    refusal = {"type": "object", "properties": {"detail": {"type": "string"}, "error": status}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lmkv coordinator",
            "version": __version__,
            "description": "RPCs take proto3's JSON: lowerCamelCase and snake_case names. See docs/reference/http.md.",
        },
        "paths": described,
        "components": {
            "schemas": {**schemas.by_name, **bodies, "Refusal": refusal},
            "responses": {
                "Status": _answer("An error; the ErrorInfo in its details contains the reason.", status),
                "Refusal": _answer("An error, with the reason.", {"$ref": "#/components/schemas/Refusal"}),
            },
        },
    }


class _Schemas:
    """Schemas of messages and enums, one each."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, Any]] = {}

    def of_message(self, message: Descriptor) -> dict[str, Any]:
        """A reference to the schema of a message."""
        if message.full_name in _WELL_KNOWN:
            return _WELL_KNOWN[message.full_name]
        if message.full_name not in self.by_name:
            schema: dict[str, Any] = {"type": "object"}
            self.by_name[message.full_name] = schema  # first, for recursive messages
            schema["properties"] = {field.json_name: self._of_field(field) for field in message.fields}
        return {"$ref": f"#/components/schemas/{message.full_name}"}

    def _of_field(self, field: FieldDescriptor) -> dict[str, Any]:
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            return {"type": "object", "additionalProperties": self._of_field(message.fields_by_name["value"])}
        single = self._of_single(field)
        return {"type": "array", "items": single} if field.is_repeated else single

    def _of_single(self, field: FieldDescriptor) -> dict[str, Any]:
        if field.message_type is not None:
            return self.of_message(field.message_type)
        if field.enum_type is not None:
            return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
        return _SCALARS[field.type]


def _of_method(method: MethodDescriptor, schemas: _Schemas) -> dict[str, Any]:
    answer = schemas.of_message(method.output_type)
    body = schemas.of_message(method.input_type)
    operation = {
        "operationId": method.full_name,
        "tags": [method.containing_service.full_name],
        "summary": SUMMARIES[method.full_name],
        "requestBody": _body(body),
        "responses": {"200": _answer("The answer.", answer), "default": {"$ref": "#/components/responses/Status"}},
    }
    if method.server_streaming:
        kinds = {"application/x-ndjson": {"schema": answer}, "text/event-stream": {"schema": {"type": "string"}}}
        operation["responses"] = {
            "200": {"description": "One message per line or event.", "content": kinds},
            "default": {"$ref": "#/components/responses/Status"},
        }
    return {"post": operation}


def _of_path(path: Path[Any]) -> dict[str, Any]:
    operation = {
        "operationId": path.body.__name__.removesuffix("Body"),
        "tags": [path.tag],
        "summary": path.summary,
        "requestBody": _body({"$ref": f"#/components/schemas/{path.body.__name__}"}),
        "responses": {
            "200": _answer("The answer.", {"type": "object", "examples": [path.example]}),
            "default": {"$ref": "#/components/responses/Refusal"},
        },
    }
    return {"post": operation}


def _operation(name: str, tag: str, summary: str, media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string" if media_type == "text/plain" else "object"}}}
    return {
        "operationId": name.strip("/"),
        "tags": [tag],
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}},
    }


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
