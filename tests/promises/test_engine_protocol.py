"""docs/reference/engine-protocol.md is true: its names, limits, errors, frames and test vectors are the code's."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.rpc import code_pb2

from lmkv.config import NodeConfig
from lmkv.errors import LmkvError
from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv.rpc.frames import FrameKind
from lmkv.spec import DTYPE_BYTES, KvSpec
from lmkv.v1 import chunk_pb2, engine_service_pb2, registry_service_pb2
from tests.promises.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "engine-protocol.md").read_text()
TEXT = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[A-Za-z]\w*(?:\.[A-Za-z]\w*)?")
FILES: list[FileDescriptor] = [module.DESCRIPTOR for module in (chunk_pb2, engine_service_pb2, registry_service_pb2)]
MESSAGES: dict[str, Descriptor] = {name: one for file in FILES for name, one in file.message_types_by_name.items()}
OWN = engine_service_pb2.DESCRIPTOR.message_types_by_name
ENUM_VALUES = {value for file in FILES for enum in file.enum_types_by_name.values() for value in enum.values_by_name}
OTHERS = {
    *("lmkv_client.engine", "engine.sock", "attach.sock", "pool.sock", "lmkv.v1", "error", "handoff"),
    *("ErrorInfo", "SCM_RIGHTS", "False", "True", "true", "replaced"),
}
"""Names that are not of our protos: sockets, a field of JSON, a tier, words of Python, metadata of an error."""
LIMITS = (
    "lmkv.rpc.endpoints.MAX_MESSAGE_BYTES",
    "lmkv_server.node.engines.service.HELLO_TIMEOUT_SECONDS",
    "lmkv.keys.MAX_KEYS",
    "lmkv_server.node.engines.lookups.MAX_TOKENS",
    "lmkv_server.node.sessions.session.MAX_EXTENTS",
    "lmkv_server.node.sessions.sessions.MAX_CREDITS",
    "lmkv_server.node.sessions.sessions.CREDIT_SHARE",
    "lmkv_server.node.sessions.session.HOLD_SHARE",
    "lmkv_server.node.engines.lookups.MAX_PARTIAL_RESERVES",
    "lmkv_server.node.cache.allocator.ALIGNMENT",
    "lmkv.spec.MAX_PARTS",
    "lmkv.spec.MAX_SPECS",
    "lmkv.spec.MAX_SERVED_MODELS",
    "lmkv.spec.MAX_FIELD_BYTES",
    "lmkv.rpc.messages.MAX_HINT_KEYS",
    "lmkv_server.node.hints.prompt_hint.MAX_ID_BYTES",
    "lmkv_server.node.engines.stream.MAX_LOOKUPS",
    "lmkv_server.node.engines.outbox.MAX_CHANGES",
    "lmkv_server.node.engines.explainer.MAX_REPORTS",
    "lmkv_server.node.engines.explainer.MAX_REPORT_BYTES",
    "lmkv_server.node.engines.service.UNARY_LOAD_TIMEOUT_SECONDS",
    "lmkv.pool.socket.MAX_LINE_BYTES",
    "lmkv.pool.socket.HELLO_SECONDS",
    "lmkv.pool.socket.MAX_RECEIVERS",
    "lmkv.rpc.frames.KEEPALIVE_SECONDS",
    "lmkv.rpc.frames.KEEPALIVE_TIMEOUT_SECONDS",
    "lmkv.config.node.MAX_SOCKET_PATH_BYTES",
)
"""The constants that define the values in the table of limits, in its order."""
DIGEST = re.compile(r"[0-9a-f]{32}")


def names() -> set[str]:
    """The identifiers in backticks, those with a dot included."""
    return {span for span in SPAN.findall(TEXT) if NAME.fullmatch(span) and not DIGEST.fullmatch(span)}


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose head begins with this cell."""
    found = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found is not None, f"no table begins with {heading}"
    return [re.split(r"(?<!\\)\|", row)[1:-1] for row in found[1].splitlines()]


def test_every_message_and_field_on_the_page_exists() -> None:
    field_names = {field for one in MESSAGES.values() for field in one.fields_by_name}
    services = {service: one for file in FILES for service, one in file.services_by_name.items()}
    methods = {f"{service}.{method}" for service, one in services.items() for method in one.methods_by_name}
    keys = {field.name for field in fields(NodeConfig)}
    reasons = {*LmkvError.by_reason, "INTERNAL"}
    known = field_names | MESSAGES.keys() | services.keys() | methods | keys | reasons | ENUM_VALUES | OTHERS
    known |= {method.partition(".")[2] for method in methods} | set(code_pb2.Code.keys()) | DTYPE_BYTES.keys()
    known |= {f"{message}.{field}" for message, one in MESSAGES.items() for field in one.fields_by_name}
    assert len(names()) > 100
    assert names() >= OTHERS
    assert sorted(names() - known) == []


def test_the_tables_of_acts_have_all_of_them_and_their_answers_are_events() -> None:
    rows = table("`Act`")
    assert [SPAN.findall(row[0])[0] for row in rows] == [field.name for field in OWN["Act"].fields]
    for row, field in zip(rows, OWN["Act"].fields, strict=True):
        carried = field.message_type
        assert carried is not None
        assert carried.name in SPAN.findall(row[1]), field.name
    answers = [set(SPAN.findall(row[2])) & set(OWN["Event"].fields_by_name) for row in rows]
    assert [bool(events) for events in answers] == [not row[2].strip().startswith("none") for row in rows]
    assert set().union(*answers) | {"conflicts", "tier_change", "audit_hits", "peer_connected"} == set(
        OWN["Event"].fields_by_name
    )


def test_an_extent_is_a_place_and_messages_named_for_it_say_what_is_there() -> None:
    assert [field.name for field in MESSAGES["Extent"].fields] == ["region", "offset", "size_bytes"]
    users = {name for name, one in MESSAGES.items() for field in one.fields if field.message_type is MESSAGES["Extent"]}
    assert users == {"HeldChunk", "WriteCredit", "GrantedChunk"}


def test_limits_are_the_values_of_what_defines_them() -> None:
    for (_, value), defined_by in zip(table("limit"), LIMITS, strict=True):
        module, _, name = defined_by.rpartition(".")
        assert float(value.replace(",", "")) == getattr(importlib.import_module(module), name), name


def test_errors_have_these_codes() -> None:
    for code, reason, *_ in table("code"):
        for name in SPAN.findall(reason):
            assert (LmkvError.by_reason[name].code if name != "INTERNAL" else "INTERNAL") == SPAN.findall(code)[0]


def test_frames_have_these_kinds() -> None:
    assert [row[0].split() for row in table("kind")] == [[str(int(kind)), kind.name.lower()] for kind in FrameKind]


def test_kv_dtypes_are_those_that_a_spec_may_have() -> None:
    (sentence,) = re.findall(r"^`kv_dtype` is one of ([^.]*)\.", PAGE, re.MULTILINE)
    assert SPAN.findall(sentence) == list(DTYPE_BYTES)


def test_the_test_vectors_are_right() -> None:
    (vector,) = re.findall(r"Test vector: (`block_size=0`.*?)\.\n", PAGE, re.DOTALL)
    *pairs, fingerprint = SPAN.findall(vector)
    numbers = {"layer_count", "kv_head_count", "head_size", "chunk_size", "format", "block_size"}
    values: dict[str, object] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        values[name] = int(value) if name in numbers else value
    assert values.pop("mla") == "False"
    spec = KvSpec(model_name="any", vocab_size=7, **values)  # type: ignore[arg-type]
    assert spec.fingerprint.hex() == fingerprint
    (root, key) = re.findall(r"`([0-9a-f]{32})`", PAGE.split("Test vector, with the fingerprint above")[1])[:2]
    assert root_key(spec.fingerprint).hex() == root
    assert chunk_keys(as_tokens(range(16)), root_key(spec.fingerprint), 16)[0].hex() == key
