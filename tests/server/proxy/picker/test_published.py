"""Our reduced proto is compatible on the wire with the published one."""

from __future__ import annotations

from typing import Any

import pytest

from lmkv.ext_proc import external_processor_pb2
from tests.server.proxy.picker.published import POOL, Request, Response

OURS = external_processor_pb2.DESCRIPTOR


def check(own: Any, published: Any, seen: set[str]) -> None:
    if own.full_name in seen:
        return
    seen.add(own.full_name)
    for field in own.fields:
        other = published.fields_by_number[field.number]
        place = f"{published.full_name}.{field.name}"
        assert other.name == field.name, place
        assert other.is_repeated == field.is_repeated, place
        assert other.type == field.type, place
        if field.message_type is not None and not field.message_type.full_name.startswith("google."):
            check(field.message_type, other.message_type, seen)
        elif field.message_type is not None:
            assert other.message_type.full_name == field.message_type.full_name
        if field.enum_type is not None:
            published_values = {value.name: value.number for value in other.enum_type.values}
            assert {value.name: value.number for value in field.enum_type.values}.items() <= published_values.items()


@pytest.mark.parametrize(("name", "published"), [("ProcessingRequest", Request), ("ProcessingResponse", Response)])
def test_each_field_has_its_published_number_name_and_type(name: str, published: Any) -> None:
    seen: set[str] = set()
    check(OURS.message_types_by_name[name], published.DESCRIPTOR, seen)
    assert len(seen) > 8


def test_the_service_has_its_published_name() -> None:
    (service,) = OURS.services_by_name.values()
    published = POOL.FindServiceByName("envoy.service.ext_proc.v3.ExternalProcessor")
    assert service.full_name == published.full_name
    (own,), (other,) = service.methods, published.methods
    assert (own.name, own.client_streaming, own.server_streaming) == (other.name, True, True)
    assert (other.input_type.name, other.output_type.name) == (own.input_type.name, own.output_type.name)
