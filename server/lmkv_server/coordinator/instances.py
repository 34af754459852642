"""Who is in the fleet: registrations, their leases and epochs, and which specs they serve. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from lmkv.errors import InstanceIdInUse, InstanceNotFound, ModelAmbiguous, ModelNotFound, StaleEpoch
from lmkv.spec import KvSpec
from lmkv.v1 import chunk_pb2, registry_service_pb2

MAX_SHOWN = 500
"""Characters of what somebody sent that go into an error: all of it must fit into the trailers of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What a node says of itself when it registers; the fields are those of `lmkv.v1.Instance`."""

    instance_id: str
    epoch: int
    peer_address: str
    specs: tuple[KvSpec, ...] = ()
    version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Why an instance shares nothing with another one of the same model; as `lmkv.v1.SpecConflict`."""

    instance_id: str
    model_name: str
    field: str
    own_value: str
    other_value: str


class Instance:
    """A registered node. Times are in seconds of the clock that `now` comes from."""

    def __init__(self, said: Registration, now: float, expire_time: float) -> None:
        self.said = said
        self.register_time = now
        self.expire_time = expire_time
        self.stream: object | None = None
        """The `Report` stream that is open now."""
        self.synced = False
        """Whether the opening snapshot of the stream is in."""
        self.layout_map_id = ""
        """Which shared layout map it was last told of."""
        self.tiers: Sequence[registry_service_pb2.TierUsage] = ()
        """How full its tiers are, as it last said."""
        self.pins: dict[str, chunk_pb2.PinnedChunks] = {}
        """Its pins by id, as it last told."""
        self.engine_count = 0
        """Engines attached to it, as it last said."""
        self.stats = registry_service_pb2.InstanceStats()
        """What it has done, as it last said."""

    def chunk_size(self, fingerprint: bytes) -> int:
        """Tokens in a full chunk of one of its specs; of its first spec if it has not named this one."""
        for spec in self.said.specs:
            if spec.fingerprint == fingerprint:
                return spec.chunk_size
        return self.said.specs[0].chunk_size if self.said.specs else 0


class Instances:
    """The registered instances, by id. An instance leaves when it deregisters, or `lease_ttl` seconds after its last
    sign of life."""

    def __init__(self, lease_ttl: float) -> None:
        self.lease_ttl = lease_ttl
        self._by_id: dict[str, Instance] = {}
        self._by_model: dict[str, dict[bytes, dict[str, KvSpec]]] = {}
        """Model name to fingerprint to instance id to the spec as that instance gave it."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Instance]:
        """In order of registration."""
        return iter(self._by_id.values())

    # --- Coming and going ----------------------------------------------------------------------------------------

    def register(self, said: Registration, now: float) -> Instance:
        """Takes an instance in, or notes what it now says of itself; either renews its lease.

        A newer epoch replaces an older one. Raises `StaleEpoch` if the registered epoch is newer, `InstanceIdInUse`
        if it lives at another address: it has a stream open and its lease has not run out.
        """
        known = self._by_id.get(said.instance_id)
        if known is not None:
            self._refuse_impostor(known, said, now)
            self._unindex(known)
        if known is not None and known.said.epoch == said.epoch:
            known.said = said
            known.expire_time = now + self.lease_ttl
        else:
            known = self._by_id[said.instance_id] = Instance(said, now, now + self.lease_ttl)
        for spec in said.specs:
            holders = self._by_model.setdefault(spec.model_name, {}).setdefault(spec.fingerprint, {})
            holders[said.instance_id] = spec
        return known

    def find(self, instance_id: str) -> Instance | None:
        """The instance of this id, whatever its epoch."""
        return self._by_id.get(instance_id)

    def get(self, instance_id: str, epoch: int) -> Instance:
        """The instance of this id and epoch. Raises `InstanceNotFound`, or `StaleEpoch` if a newer one is there."""
        known = self._by_id.get(instance_id)
        if known is not None and known.said.epoch > epoch:
            raise self._stale(known, epoch)
        if known is None or known.said.epoch != epoch:
            shown = instance_id[:MAX_SHOWN]
            raise InstanceNotFound(
                f"instance {shown!r} of epoch {epoch} is not registered", instance_id=shown, epoch=epoch
            )
        return known

    def named(self, instance_id: str, field: str) -> Instance:
        """The instance that a request's field names. Raises `InstanceNotFound`, with those that there are."""
        known = self._by_id.get(instance_id)
        if known is None:
            shown = instance_id[:MAX_SHOWN]
            names = ", ".join(sorted(self._by_id))[:MAX_SHOWN] or "none"
            raise InstanceNotFound(
                f"{field}: instance {shown!r} is not registered; registered are: {names}", instance_id=shown
            )
        return known

    def renew(self, instance: Instance, now: float) -> None:
        """Notes a sign of life."""
        instance.expire_time = now + self.lease_ttl

    def deregister(self, instance_id: str, epoch: int) -> Instance:
        """Lets an instance leave. Raises what `get` raises."""
        instance = self.get(instance_id, epoch)
        self._drop(instance)
        return instance

    def expire(self, now: float) -> list[Instance]:
        """Drops the instances whose lease has run out, and returns them."""
        gone = [instance for instance in self if instance.expire_time <= now]
        for instance in gone:
            self._drop(instance)
        return gone

    def next_expiry(self) -> float | None:
        """When the next lease runs out unless it is renewed; None without instances."""
        return min((instance.expire_time for instance in self), default=None)

    def postpone(self, seconds: float) -> None:
        """Lengthens every lease: for time in which nobody could have been heard."""
        for instance in self:
            instance.expire_time += seconds

    # --- Specs ---------------------------------------------------------------------------------------------------

    def specs(self, model_name: str = "") -> list[KvSpec]:
        """The specs that tokens of a model may be keyed under, one per fingerprint; without a name, the only one.

        Empty if nothing is registered and no name is given. Raises `ModelNotFound`, `ModelAmbiguous`.
        """
        if model_name:
            if model_name not in self._by_model:
                raise ModelNotFound(
                    f"no registered instance serves the model {model_name[:MAX_SHOWN]!r}; served are: "
                    f"{self._model_names() or 'none'}",
                    model_name=model_name[:MAX_SHOWN],
                    known_models=self._model_names(),
                )
            return [next(iter(holders.values())) for holders in self._by_model[model_name].values()]
        found = {
            fingerprint: next(iter(holders.values()))
            for by_fingerprint in self._by_model.values()
            for fingerprint, holders in by_fingerprint.items()
        }
        if len(found) > 1:
            names = self._model_names()
            raise ModelAmbiguous(
                f"{len(found)} specs are registered; say which by model_name, one of: {names}", known_models=names
            )
        return list(found.values())

    def conflicts(self, instance: Instance, limit: int) -> list[Conflict]:
        """Instances of the same models whose chunks it cannot share, and the first field that keeps them apart.

        At most `limit` of them, by model and id.
        """
        found: list[Conflict] = []
        for model_name in dict.fromkeys(spec.model_name for spec in instance.said.specs):
            own = {spec.fingerprint: spec for spec in instance.said.specs if spec.model_name == model_name}
            others = self._by_model[model_name]
            if others.keys() <= own.keys():
                continue
            sharing = {instance_id for fingerprint in own for instance_id in others[fingerprint]}
            strangers = {
                instance_id: spec
                for fingerprint, holders in others.items()
                if fingerprint not in own
                for instance_id, spec in holders.items()
                if instance_id not in sharing
            }
            first = next(iter(own.values()))
            found += [
                _conflict(first, spec, instance_id)
                for instance_id, spec in sorted(strangers.items(), key=itemgetter(0))[:limit]
            ]
        return found[:limit]

    def check(self) -> None:
        """Asserts what must hold between any two calls. Reads everything: for tests."""
        indexed = {
            (model_name, fingerprint, instance_id)
            for model_name, by_fingerprint in self._by_model.items()
            for fingerprint, holders in by_fingerprint.items()
            for instance_id in holders
        }
        said = {
            (spec.model_name, spec.fingerprint, instance.said.instance_id)
            for instance in self
            for spec in instance.said.specs
        }
        assert indexed == said, "the index by model is that of the instances"
        assert all(by_fingerprint for by_fingerprint in self._by_model.values())
        assert all(holders for specs in self._by_model.values() for holders in specs.values())

    # --- Inside --------------------------------------------------------------------------------------------------

    def _model_names(self) -> str:
        return ", ".join(sorted(self._by_model))[:MAX_SHOWN]

    def _refuse_impostor(self, known: Instance, said: Registration, now: float) -> None:
        if said.epoch < known.said.epoch and known.expire_time > now:
            raise self._stale(known, said.epoch)
        alive = known.stream is not None and known.expire_time > now
        if alive and said.peer_address != known.said.peer_address:
            raise InstanceIdInUse(
                f"instance_id {said.instance_id!r} is in use by a living node at {known.said.peer_address}; "
                "give this one another instance_id",
                instance_id=said.instance_id,
                peer_address=known.said.peer_address,
                epoch=known.said.epoch,
                lease_ttl=self.lease_ttl,
            )

    def _stale(self, known: Instance, epoch: int) -> StaleEpoch:
        return StaleEpoch(
            f"epoch {epoch} of instance {known.said.instance_id!r} is stale: epoch {known.said.epoch} registered from "
            f"{known.said.peer_address}; if two nodes run, give each its own instance_id",
            instance_id=known.said.instance_id,
            epoch=epoch,
            newer_epoch=known.said.epoch,
            peer_address=known.said.peer_address,
            lease_ttl=self.lease_ttl,
        )

    def _drop(self, instance: Instance) -> None:
        self._unindex(instance)
        del self._by_id[instance.said.instance_id]

    def _unindex(self, instance: Instance) -> None:
        for spec in instance.said.specs:
            by_fingerprint = self._by_model.get(spec.model_name, {})
            holders = by_fingerprint.get(spec.fingerprint, {})
            holders.pop(instance.said.instance_id, None)
            if not holders:
                by_fingerprint.pop(spec.fingerprint, None)
            if not by_fingerprint:
                self._by_model.pop(spec.model_name, None)


def _conflict(own: KvSpec, other: KvSpec, instance_id: str) -> Conflict:
    field = own.first_difference(other)
    assert field is not None, "different fingerprints have a difference"
    return Conflict(
        instance_id=instance_id,
        model_name=own.model_name,
        field=field,
        own_value=_value(own, field),
        other_value=_value(other, field),
    )


def _value(spec: KvSpec, field: str) -> str:
    value = getattr(spec, field)
    return chunk_pb2.KvFormat.Name(value) if field == "format" else str(value)
