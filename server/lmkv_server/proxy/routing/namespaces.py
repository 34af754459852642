"""The specs and LoRA adapters by the names under which engines serve them, as instances register them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmkv.errors import BadKvSpec
from lmkv.spec import KvSpec
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_server.proxy.routing.growing_keys import GrowingKeys

MAX_NAMESPACES = 16
"""Specs and adapters of one name that a lookup covers, the last registered ones; as at the coordinator."""


@dataclass(frozen=True, slots=True)
class ServedNamespace:
    """The inputs of chunk keys besides tokens and cache salt."""

    spec: KvSpec
    lora_identity: str = ""

    def growing_keys(self, cache_salt: str, secret: bytes) -> GrowingKeys:
        """The keys of a prompt, of which there are no tokens yet."""
        return GrowingKeys(self.spec, self.lora_identity, cache_salt, secret)


class Namespaces:
    """The namespaces of a fleet."""

    def __init__(self, instances: Iterable[Instance] = ()) -> None:
        self._by_name: dict[str, dict[tuple[bytes, str], ServedNamespace]] = {}
        for instance in instances:
            self._add(instance)

    def of(self, model_name: str) -> list[ServedNamespace]:
        """The possible namespaces of a prompt. Without a name, those of the only spec; empty if there are several."""
        if model_name:
            return list(self._by_name.get(model_name, {}).values())[-MAX_NAMESPACES:]
        specs = {
            one.spec.fingerprint: one
            for kinds in self._by_name.values()
            for one in kinds.values()
            if not one.lora_identity
        }
        return list(specs.values()) if len(specs) == 1 else []

    def _add(self, instance: Instance) -> None:
        specs: dict[bytes, KvSpec] = {}
        for message in instance.specs:
            try:
                specs[message.fingerprint] = spec = KvSpec.from_proto(message)
            except BadKvSpec:  # of a newer version: its chunks are not found
                continue
            self._by_name.setdefault(spec.model_name, {})[spec.fingerprint, ""] = ServedNamespace(spec)
        for served in instance.served_models:
            if served.fingerprint in specs:
                kinds = self._by_name.setdefault(served.name, {})
                kinds[served.fingerprint, served.lora_identity] = ServedNamespace(
                    specs[served.fingerprint], served.lora_identity
                )
