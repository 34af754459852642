"""What a node sends when it registers, checked. Used by `RegistryService`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lmkv.errors import BadInstance, BadKvSpec
from lmkv.spec import MAX_FIELD_BYTES, MAX_SERVED_MODELS, MAX_SPECS, KvSpec, ServedModel
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb

MAX_ID_BYTES = 256
SECRET_BYTES = range(16, 65)
"""How long the secret of an instance may be."""
MAX_SHOWN = 500
"""Characters of a caller's text that an error repeats: all of it must fit into the trailers of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What a node says of itself when it registers; the fields are those of `lmkv.v1.Instance`."""

    instance_id: str
    epoch: int
    peer_address: str
    specs: tuple[KvSpec, ...] = ()
    version: str = ""
    served_models: tuple[ServedModel, ...] = ()
    """Names besides the specs' own; the fingerprint of each is that of one of `specs`."""


def registration(message: pb.Instance) -> Registration:
    """What a node says of itself, checked. Raises `BadInstance`, `BadKvSpec`."""
    instance_id = message.instance_id
    if not 0 < len(instance_id.encode()) <= MAX_ID_BYTES or not instance_id.isprintable():
        raise BadInstance(
            f"instance_id must have 1 to {MAX_ID_BYTES} bytes, all printable", instance_id=instance_id[:MAX_ID_BYTES]
        )
    if message.epoch <= 0:
        raise BadInstance(f"epoch {message.epoch} is not positive", instance_id=instance_id, epoch=message.epoch)
    host, colon, port = message.peer_address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536
    if not (host and colon and is_port and host.isprintable() and len(host) <= MAX_ID_BYTES):
        raise BadInstance(
            f"peer_address {message.peer_address[:MAX_SHOWN]!r} is not host:port",
            instance_id=instance_id,
            peer_address=message.peer_address[:MAX_SHOWN],
        )
    specs = _specs(message)
    return Registration(
        instance_id=instance_id,
        epoch=message.epoch,
        peer_address=message.peer_address,
        specs=specs,
        version=message.version,
        served_models=served_models(message.served_models, {spec.fingerprint for spec in specs}),
    )


def check_secret(secret: bytes, instance_id: str) -> None:
    """Raises `BadInstance` if the secret is one that can be guessed, or too long."""
    if secret and len(secret) not in SECRET_BYTES:
        raise BadInstance(
            f"secret has {len(secret)} bytes; it must have {SECRET_BYTES.start} to {SECRET_BYTES.stop - 1}",
            instance_id=instance_id,
            field="secret",
        )


def _specs(message: pb.Instance) -> tuple[KvSpec, ...]:
    if len(message.specs) > MAX_SPECS:
        raise BadInstance(
            f"specs: {len(message.specs)} specs; an instance has at most {MAX_SPECS}, one per kind of engine that "
            "has attached",
            instance_id=message.instance_id,
            field="specs",
        )
    for spec in message.specs:
        for field, value in spec.ListFields():
            if isinstance(value, str) and len(value.encode()) > MAX_FIELD_BYTES:
                raise BadInstance(
                    f"specs.{field.name} has {len(value.encode())} bytes; at most {MAX_FIELD_BYTES} are allowed",
                    instance_id=message.instance_id,
                    field=f"specs.{field.name}",
                )
    return tuple(KvSpec.from_proto(spec) for spec in message.specs)


def served_models(
    messages: Sequence[chunk_pb2.ServedModel], fingerprints: Collection[bytes]
) -> tuple[ServedModel, ...]:
    """The served models that a node sends, checked. Raises `BadKvSpec`."""
    if len(messages) > MAX_SERVED_MODELS:
        raise BadKvSpec(
            f"served_models has {len(messages)} entries; at most {MAX_SERVED_MODELS} are allowed",
            field="served_models",
            limit=MAX_SERVED_MODELS,
        )
    models = tuple(
        ServedModel(name=one.name, fingerprint=one.fingerprint, lora_identity=one.lora_identity) for one in messages
    )
    if any(model.fingerprint not in fingerprints for model in models):
        raise BadKvSpec("served_models: a fingerprint is of none of the instance's specs", field="served_models")
    return models
