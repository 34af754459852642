"""Values that instances register and report, and the index of the names under which they serve models. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from lmkv.errors import BadSelection, Full, ModelAmbiguous, ModelNotFound
from lmkv.spec import KvSpec, ServedModel

MAX_SHOWN = 500
"""Characters of a client's text that an error repeats: all of them must fit into the trailers of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedTier:
    """The usage of a tier; the fields are those of `lmkv.v1.TierUsage`."""

    tier: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    chunk_count: int = 0
    salt_quota_bytes: int = 0
    max_salt_used_bytes: int = 0
    salt_count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedPin:
    """A pin in force; its fields are those of `lmkv.v1.PinnedChunks`."""

    pin_id: str
    tier: str
    chunk_count: int
    token_count: int
    expire_time_ns: int
    """The time of expiry by the wall clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedTraffic:
    """Chunks and bytes that an instance has fetched from another one; the fields are those of `lmkv.v1.PeerTraffic`."""

    instance_id: str
    chunk_count: int
    transferred_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedStats:
    """Statistics of an instance since its start; the fields are those of `lmkv.v1.InstanceStats`, times in seconds."""

    asked_chunks: int = 0
    own_chunks: int = 0
    peer_chunks: int = 0
    evicted_chunks: int = 0
    load_count: int = 0
    load_seconds: float = 0.0
    avoided_prefill_seconds: float = 0.0
    traffic: tuple[ReportedTraffic, ...] = ()
    wrong_chunks: int = 0
    stopped_models: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceInfo:
    """The registration of a node; the fields are those of `lmkv.v1.Instance`."""

    instance_id: str
    epoch: int
    peer_address: str
    specs: tuple[KvSpec, ...] = ()
    version: str = ""
    served_models: tuple[ServedModel, ...] = ()
    """Further names; the fingerprint of each is that of one of `specs`."""
    coordinator_count: int = 0
    size_bytes: int = field(default=0, compare=False)
    """Size of its message."""


MAX_KINDS = 64
"""Specs and adapters of one name: each costs a key per chunk of a prompt."""
MAX_NAMES = 4096
"""Names of models and adapters in a fleet."""
RETRY_SECONDS = 5.0
"""Retry delay of an instance that exceeds a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecConflict:
    """The reason why two instances of a model cannot share chunks; the fields are those of `lmkv.v1.SpecConflict`."""

    instance_id: str
    model_name: str
    field: str
    own_value: str
    other_value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """The inputs of chunk keys besides tokens and cache salt."""

    spec: KvSpec
    lora_identity: str = ""


_Kind = tuple[bytes, str]
"""Fingerprint and LoRA identity."""


class Models:
    """Specs by served name."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[_Kind, dict[str, KvSpec]]] = {}
        """Name to fingerprint and LoRA identity to instance id to the spec that this instance sent."""
        self._by_fingerprint: dict[bytes, dict[str, KvSpec]] = {}
        """Fingerprint to instance id to the spec that this instance sent."""

    def check_room(self, info: InstanceInfo) -> None:
        """Raises `Full` if this registration would exceed `MAX_KINDS` for a name, or `MAX_NAMES`."""
        kinds: dict[str, set[_Kind]] = {}
        for name, kind, _ in _served(info):
            kinds.setdefault(name, set()).add(kind)
        new_count = sum(name not in self._by_name for name in kinds)
        if new_count and len(self._by_name) + new_count > MAX_NAMES:
            raise Full(
                f"served_models: {len(self._by_name)} names of models and adapters are in this fleet, at most "
                f"{MAX_NAMES} are allowed; stop engines with served names that no request uses",
                retry_seconds=RETRY_SECONDS,
            )
        for name, own in kinds.items():
            known = self._by_name.get(name, {}).keys()
            if not own <= known and len(own | known) > MAX_KINDS:
                raise Full(
                    f"specs: model {name[:MAX_SHOWN]!r} has {len(known)} specs and adapters in this fleet, at most "
                    f"{MAX_KINDS} are allowed; stop the nodes whose engines have other settings of the KV cache",
                    retry_seconds=RETRY_SECONDS,
                    model_name=name[:MAX_SHOWN],
                )

    def add(self, info: InstanceInfo) -> None:
        """Adds the names of an instance."""
        for name, kind, spec in _served(info):
            self._by_name.setdefault(name, {}).setdefault(kind, {})[info.instance_id] = spec
        for spec in info.specs:
            self._by_fingerprint.setdefault(spec.fingerprint, {})[info.instance_id] = spec

    def remove(self, info: InstanceInfo) -> None:
        """Removes the names of an instance. Idempotent."""
        for name, kind, _ in _served(info):
            by_kind = self._by_name.get(name, {})
            holders = by_kind.get(kind, {})
            holders.pop(info.instance_id, None)
            if not holders:
                by_kind.pop(kind, None)
            if not by_kind:
                self._by_name.pop(name, None)
        for spec in info.specs:
            of_spec = self._by_fingerprint.get(spec.fingerprint, {})
            of_spec.pop(info.instance_id, None)
            if not of_spec:
                self._by_fingerprint.pop(spec.fingerprint, None)

    def find_spec(self, fingerprint: bytes) -> KvSpec | None:
        """The spec of a fingerprint; None if no instance has registered it."""
        return next(iter(self._by_fingerprint.get(fingerprint, {}).values()), None)

    def max_part_count(self) -> int:
        """The largest number of parts of a chunk, over all specs."""
        return max((len(next(iter(one.values())).parts) for one in self._by_fingerprint.values()), default=1)

    def specs(self, model_name: str = "") -> list[KvSpec]:
        """The specs of a model, one per fingerprint; without a name, the only one whose chunks are of tokens.

        Empty if nothing is registered and no name is given. Raises `ModelNotFound`, `ModelAmbiguous`, and
        `BadSelection` if the name is that of a LoRA adapter.
        """
        if model_name:
            found = [one.spec for one in self._named(model_name) if not one.lora_identity]
            if not found:
                raise BadSelection(
                    f"model_name: {model_name[:MAX_SHOWN]!r} is a LoRA adapter, whose chunks can be selected by tokens "
                    "only: add tokens, or name the model itself to select all its chunks",
                    model_name=model_name[:MAX_SHOWN],
                )
            return found
        return self._only()

    def namespaces(self, model_name: str = "", lora_name: str = "") -> list[Namespace]:
        """The possible namespaces of a prompt; `lora_name` is a served name, or an identity `name@digest`.

        Empty if nothing is registered and no name is given. Raises `ModelNotFound`, `ModelAmbiguous`.
        """
        if not lora_name:
            return self._named(model_name) if model_name else [Namespace(spec=spec) for spec in self._only()]
        adapters = [one for one in self._find(lora_name) if one.lora_identity]
        if model_name:
            allowed = {one.spec.fingerprint for one in self._named(model_name)}
            adapters = [one for one in adapters if one.spec.fingerprint in allowed]
        if not adapters and "@" in lora_name:
            specs = self.specs(model_name)
            adapters = [Namespace(spec=spec, lora_identity=lora_name) for spec in specs]
        if not adapters:
            known = self._names(adapters=True)
            raise ModelNotFound(
                f"no engine has registered a LoRA adapter {lora_name[:MAX_SHOWN]!r}, which happens with the adapter's "
                f"first request; registered are: {known or 'none'}",
                lora_name=lora_name[:MAX_SHOWN],
                known_models=known,
            )
        return adapters

    def other_names(self, model_name: str) -> list[str]:
        """The other names of the specs of this name, sorted; empty if it is unknown."""
        fingerprints = {one.spec.fingerprint for one in self._find(model_name)}
        return sorted(
            name
            for name, by_kind in self._by_name.items()
            if name != model_name and any(fingerprint in fingerprints for fingerprint, _ in by_kind)
        )

    def conflicts(self, info: InstanceInfo, limit: int) -> list[SpecConflict]:
        """Instances of the same models whose chunks this one cannot share, with the first field that differs.

        At most `limit`, by model and id.
        """
        found: list[SpecConflict] = []
        for model_name in dict.fromkeys(spec.model_name for spec in info.specs):
            own = {spec.fingerprint: spec for spec in info.specs if spec.model_name == model_name}
            others = {
                fingerprint: holders
                for (fingerprint, lora_identity), holders in self._by_name[model_name].items()
                if not lora_identity
            }
            if others.keys() <= own.keys():
                continue
            sharing = {instance_id for fingerprint in own for instance_id in others[fingerprint]}
            others_by_id = {
                instance_id: spec
                for fingerprint, holders in others.items()
                if fingerprint not in own
                for instance_id, spec in holders.items()
                if instance_id not in sharing
            }
            first = next(iter(own.values()))
            found += [
                _conflict(first, spec, instance_id)
                for instance_id, spec in sorted(others_by_id.items(), key=itemgetter(0))[:limit]
            ]
        return found[:limit]

    def check(self, info: Iterable[InstanceInfo]) -> None:
        """Asserts that exactly these instances are indexed. Reads everything: for tests."""
        info = list(info)
        by_fingerprint = {
            (fingerprint, instance_id) for fingerprint, one in self._by_fingerprint.items() for instance_id in one
        }
        assert by_fingerprint == {(spec.fingerprint, one.instance_id) for one in info for spec in one.specs}
        assert all(self._by_fingerprint.values())
        indexed = {
            (name, kind, instance_id)
            for name, by_kind in self._by_name.items()
            for kind, holders in by_kind.items()
            for instance_id in holders
        }
        expected = {(name, kind, one.instance_id) for one in info for name, kind, _ in _served(one)}
        assert indexed == expected, "the index differs from the instances"
        assert all(by_kind for by_kind in self._by_name.values())
        assert all(holders for by_kind in self._by_name.values() for holders in by_kind.values())

    def _only(self) -> list[KvSpec]:
        found = {
            fingerprint: next(iter(holders.values()))
            for by_kind in self._by_name.values()
            for (fingerprint, _), holders in by_kind.items()
            if next(iter(holders.values())).has_tokens
        }
        if len(found) > 1:
            names = self._names()
            raise ModelAmbiguous(
                f"{len(found)} specs are registered; select one by model_name, one of: {names}", known_models=names
            )
        return list(found.values())

    def _find(self, name: str) -> list[Namespace]:
        by_kind = self._by_name.get(name, {})
        return [
            Namespace(spec=next(iter(holders.values())), lora_identity=lora_identity)
            for (_, lora_identity), holders in by_kind.items()
        ]

    def _named(self, model_name: str) -> list[Namespace]:
        found = self._find(model_name)
        if not found:
            names = self._names()
            raise ModelNotFound(
                f"no engine has registered the model {model_name[:MAX_SHOWN]!r}; registered are: {names}"
                if names
                else f"model_name {model_name[:MAX_SHOWN]!r} is unknown: no engine has registered yet",
                model_name=model_name[:MAX_SHOWN],
                known_models=names,
            )
        return found

    def _names(self, *, adapters: bool = False) -> str:
        names = (
            name
            for name, by_kind in self._by_name.items()
            if not adapters or any(lora_identity for _, lora_identity in by_kind)
        )
        return ", ".join(sorted(names))[:MAX_SHOWN]


def _served(info: InstanceInfo) -> Iterator[tuple[str, _Kind, KvSpec]]:
    """Every name of an instance, with fingerprint, LoRA identity and spec; may contain duplicates."""
    specs = {spec.fingerprint: spec for spec in info.specs}
    for spec in info.specs:
        yield spec.model_name, (spec.fingerprint, ""), spec
    for model in info.served_models:
        yield model.name, (model.fingerprint, model.lora_identity), specs[model.fingerprint]


def _conflict(own: KvSpec, other: KvSpec, instance_id: str) -> SpecConflict:
    field = own.first_difference(other)
    assert field is not None, "different fingerprints have a difference"
    return SpecConflict(
        instance_id=instance_id,
        model_name=own.model_name,
        field=field,
        own_value=own.shown(field),
        other_value=other.shown(field),
    )
