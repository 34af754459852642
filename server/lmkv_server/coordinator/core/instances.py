"""Registered instances: leases, epochs, models, the bytes that they make a coordinator store, and how many of them
may join at a time. Pure; time is passed in.

A joining instance reports all its chunks, which takes the coordinator milliseconds. A thousand at once take longer than
the timeout of nodes: they would all time out and retry, and none would ever complete.
"""

from __future__ import annotations

import hmac
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256

from lmkv.errors import Full, InstanceIdInUse, InstanceNotFound, StaleEpoch
from lmkv.runtime.places import Places
from lmkv_server.coordinator.core.models import (
    MAX_SHOWN,
    InstanceInfo,
    Models,
    ReportedPin,
    ReportedStats,
    ReportedTier,
)

RETRY_SECONDS = 5.0
"""Retry delay of what did not fit."""


class Budget:
    """Sizes of items by owner, the id of an instance. The owner "" is the coordinator, limited by the total only."""

    def __init__(self, *, owner_bytes: int, total_bytes: int) -> None:
        self._owner_bytes = owner_bytes
        self._total_bytes = total_bytes
        self._items: dict[str, dict[str, int]] = {}
        self._used_by: dict[str, int] = {}
        self.used_bytes = 0
        """Total of all owners."""

    def items(self, owner: str) -> Iterator[str]:
        """The items of an owner, oldest first."""
        return iter(self._items.get(owner, {}))

    def fits(self, owner: str, item: str, size_bytes: int) -> bool:
        return self.owner_fits(owner, item, size_bytes) and (
            self.used_bytes + self._growth(owner, item, size_bytes) <= self._total_bytes
        )

    def owner_fits(self, owner: str, item: str, size_bytes: int) -> bool:
        """Whether an item may have this size within its owner's limit."""
        used = self._used_by.get(owner, 0) + self._growth(owner, item, size_bytes)
        return not owner or used <= self._owner_bytes

    def charge(self, owner: str, item: str, size_bytes: int) -> None:
        """Sets the size of an item. Raises `Full` if it does not fit."""
        if not self.fits(owner, item, size_bytes):
            bound = "all instances" if self.owner_fits(owner, item, size_bytes) else "one instance"
            limit = self._total_bytes if bound == "all instances" else self._owner_bytes
            raise Full(
                f"{item} of {size_bytes} bytes: the limit of {bound} is {limit} bytes; send less",
                retry_seconds=RETRY_SECONDS,
                field=item,
                limit=limit,
            )
        self.set(owner, item, size_bytes)

    def set(self, owner: str, item: str, size_bytes: int) -> None:
        """Sets the size of an item, whether it fits or not."""
        growth = self._growth(owner, item, size_bytes)
        self._items.setdefault(owner, {})[item] = size_bytes
        self._used_by[owner] = self._used_by.get(owner, 0) + growth
        self.used_bytes += growth

    def drop(self, owner: str, item: str) -> None:
        """Removes an item. Idempotent."""
        items = self._items.get(owner, {})
        size_bytes = items.pop(item, 0)
        self.used_bytes -= size_bytes
        if items:
            self._used_by[owner] -= size_bytes
        else:
            self._items.pop(owner, None)
            self._used_by.pop(owner, None)

    def drop_owner(self, owner: str) -> None:
        """Removes all items of an owner. Idempotent."""
        for item in list(self.items(owner)):
            self.drop(owner, item)

    def check(self) -> None:
        """Asserts that the sums are correct: for tests."""
        sums = {owner: sum(items.values()) for owner, items in self._items.items()}
        assert sums == self._used_by
        assert sum(sums.values()) == self.used_bytes

    def _growth(self, owner: str, item: str, size_bytes: int) -> int:
        return size_bytes - self._items.get(owner, {}).get(item, 0)


NO_ADDRESS = "no address (enable_p2p is false)"
"""Replaces the address of an instance without one in errors."""
MAX_OWNER_BYTES = 2 << 20
"""Size limit of one instance's registration, tiers, statistics and pins."""
MAX_TOTAL_BYTES = 256 << 20
"""Size limit of the same over all instances of a tenant."""


class Instance:
    """A registered node. Times are in seconds of the clock of `now`."""

    def __init__(self, info: InstanceInfo, now: float, expire_time: float, secret: bytes = b"") -> None:
        self.info = info
        self._secret_digest = sha256(secret).digest() if secret else b""
        self.register_time = now
        self.expire_time = expire_time
        self.stream: object | None = None
        """The open `Report` stream."""
        self.synced = False
        """Whether the snapshot of the stream is complete."""
        self.layout_map_id = ""
        """Id of the shared layout map at its registration."""
        self.tiers: Sequence[ReportedTier] = ()
        """Its tiers, with the usage that it reported last."""
        self.pins: dict[str, ReportedPin] = {}
        """Its pins by id, as last reported."""
        self.engine_count = 0
        """Engines attached to it, as last reported."""
        self.end_time_ns = 0
        """When it ends unless an engine attaches, in nanoseconds since 1970, as last reported; 0: it stays."""
        self.stats = ReportedStats()
        """Its statistics, as last reported."""
        self.fetch_serial = 0
        """Its count of fetch orders, as last reported; see `DropOrder.fetch_serial`."""
        self.leaving_until = 0.0
        """The time up to which a drain of any coordinator lets it expect to be stopped, as last reported."""
        self.drained_until = 0.0
        """The same time by a drain of this coordinator, which it may not have reported yet."""

    @property
    def is_standby(self) -> bool:
        """Whether it stays without engines: then it takes chunks of any spec, for engines that will come."""
        return self.engine_count == 0 and self.end_time_ns == 0

    def is_leaving(self, now: float) -> bool:
        """Whether it is about to be stopped: then it receives no chunks."""
        return now < max(self.leaving_until, self.drained_until)

    def accepts(self, fingerprint: bytes) -> bool:
        """Whether it can hold chunks of a registered spec."""
        return self.is_standby or any(spec.fingerprint == fingerprint for spec in self.info.specs)

    def has_secret(self, secret: bytes) -> bool:
        """Whether this is the secret of its registration."""
        return hmac.compare_digest(self._secret_digest, sha256(secret).digest() if secret else b"")

    def chunk_size(self, fingerprint: bytes) -> int:
        """Tokens in a full chunk of one of its specs; of its first spec if the fingerprint is unknown."""
        for spec in self.info.specs:
            if spec.fingerprint == fingerprint:
                return spec.chunk_size
        return self.info.specs[0].chunk_size if self.info.specs else 0


class Instances:
    """The registered instances, by id. An instance leaves when it deregisters, or `lease_ttl` seconds after its last
    report."""

    def __init__(self, lease_ttl: float) -> None:
        self.lease_ttl = lease_ttl
        self._by_id: dict[str, Instance] = {}
        self.budget = Budget(owner_bytes=MAX_OWNER_BYTES, total_bytes=MAX_TOTAL_BYTES)
        """The memory that they use besides chunks and operations."""
        self.models = Models()
        """The models that they serve, by name."""
        self._unsynced: dict[str, Instance] = {}
        """Instances that were not synced at the last check."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Instance]:
        """Instances in order of registration."""
        return iter(self._by_id.values())

    # --- Membership ----------------------------------------------------------------------------------------------

    def register(self, info: InstanceInfo, now: float, secret: bytes = b"") -> Instance:
        """Registers an instance, or updates its registration; both renew its lease.

        A newer epoch replaces an older one. Raises `StaleEpoch` if the registered epoch is newer, `InstanceIdInUse`
        if the id is registered with another secret; without secrets, if it is alive at another address: it has an open
        stream and its lease has not expired. `Full` if a model has too many specs.
        """
        self.check_secret(info.instance_id, secret)
        known = self._by_id.get(info.instance_id)
        if known is not None:
            self._refuse_impostor(known, info, now, secret)
        self.models.check_room(info)
        self.budget.charge(info.instance_id, "registration", info.size_bytes)
        if known is not None:
            self.models.remove(known.info)
        if known is not None and known.info.epoch == info.epoch:
            known.info = info
            known.expire_time = now + self.lease_ttl
        else:
            for item in ("tiers", "stats", "pins"):
                self.budget.drop(info.instance_id, item)
            known = self._by_id[info.instance_id] = Instance(info, now, now + self.lease_ttl, secret)
            self.mark_unsynced(known)
        self.models.add(info)
        return known

    def find(self, instance_id: str) -> Instance | None:
        """The instance of this id, in any epoch."""
        return self._by_id.get(instance_id)

    def get(self, instance_id: str, epoch: int) -> Instance:
        """The instance of this id and epoch. Raises `InstanceNotFound`, or `StaleEpoch` if a newer one is known."""
        known = self._by_id.get(instance_id)
        if known is not None and known.info.epoch > epoch:
            raise self._stale(known, epoch)
        if known is None or known.info.epoch != epoch:
            shown = instance_id[:MAX_SHOWN]
            raise InstanceNotFound(
                f"instance {shown!r} of epoch {epoch} is not registered", instance_id=shown, epoch=epoch
            )
        return known

    def check_secret(self, instance_id: str, secret: bytes) -> None:
        """Raises `InstanceIdInUse` if the id is registered with another secret, until `expire` removes it."""
        known = self._by_id.get(instance_id)
        if known is not None and not known.has_secret(secret):
            raise self._in_use(known)

    def named(self, instance_id: str, field: str) -> Instance:
        """The instance that a request's field names. Raises `InstanceNotFound`, which lists those registered."""
        known = self._by_id.get(instance_id)
        if known is None:
            shown = instance_id[:MAX_SHOWN]
            names = ", ".join(sorted(self._by_id))[:MAX_SHOWN] or "none"
            raise InstanceNotFound(
                f"{field}: instance {shown!r} is not registered; registered are: {names}", instance_id=shown
            )
        return known

    def renew(self, instance: Instance, now: float) -> None:
        """Extends the lease."""
        instance.expire_time = now + self.lease_ttl

    def deregister(self, instance_id: str, epoch: int) -> Instance:
        """Removes an instance. Raises as `get`."""
        instance = self.get(instance_id, epoch)
        self._drop(instance)
        return instance

    def expire(self, now: float) -> list[Instance]:
        """Removes the instances whose lease expired, and returns them."""
        gone = [instance for instance in self if instance.expire_time <= now]
        for instance in gone:
            self._drop(instance)
        return gone

    def next_expiry(self) -> float | None:
        """Returns when the next lease expires unless it is renewed; None without instances."""
        return min((instance.expire_time for instance in self), default=None)

    def mark_unsynced(self, instance: Instance) -> None:
        """The layout map may lack chunks of an instance, until its `synced` is set."""
        instance.synced = False
        self._unsynced[instance.info.instance_id] = instance

    def has_unsynced(self) -> bool:
        """Whether the layout map may lack chunks of an instance."""
        while self._unsynced:  # does not read all instances: every lookup calls it
            instance_id, instance = next(reversed(self._unsynced.items()))
            if not instance.synced:
                return True
            del self._unsynced[instance_id]
        return False

    def postpone(self, seconds: float) -> None:
        """Extends every lease, for a time in which no report could be received."""
        for instance in self:
            instance.expire_time += seconds

    def check(self) -> None:
        """Asserts the invariants. Reads everything: for tests."""
        self.budget.check()
        self.models.check(instance.info for instance in self)
        not_synced = {instance.info.instance_id for instance in self if not instance.synced}
        assert not_synced <= self._unsynced.keys()
        assert all(self._by_id.get(instance_id) is one for instance_id, one in self._unsynced.items())

    # --- Inside --------------------------------------------------------------------------------------------------

    def _refuse_impostor(self, known: Instance, info: InstanceInfo, now: float, secret: bytes) -> None:
        if info.epoch < known.info.epoch and known.expire_time > now:
            raise self._stale(known, info.epoch)
        alive = known.stream is not None and known.expire_time > now
        if alive and not secret and info.peer_address != known.info.peer_address:
            raise self._in_use(known)

    def _in_use(self, known: Instance) -> InstanceIdInUse:
        return InstanceIdInUse(
            f"instance_id {known.info.instance_id!r} is in use by a living node at "
            f"{known.info.peer_address or NO_ADDRESS}; give this one another instance_id",
            instance_id=known.info.instance_id,
            peer_address=known.info.peer_address,
            epoch=known.info.epoch,
            lease_ttl=self.lease_ttl,
        )

    def _stale(self, known: Instance, epoch: int) -> StaleEpoch:
        return StaleEpoch(
            f"epoch {epoch} of instance {known.info.instance_id!r} is stale: epoch {known.info.epoch} registered from "
            f"{known.info.peer_address or NO_ADDRESS}; if two nodes run, give each its own instance_id",
            instance_id=known.info.instance_id,
            epoch=epoch,
            newer_epoch=known.info.epoch,
            peer_address=known.info.peer_address,
            lease_ttl=self.lease_ttl,
        )

    def _drop(self, instance: Instance) -> None:
        self.models.remove(instance.info)
        self.budget.drop_owner(instance.info.instance_id)
        del self._by_id[instance.info.instance_id]
        self._unsynced.pop(instance.info.instance_id, None)


MAX_JOINING = 64
"""Instances of all tenants that join at a time."""
MAX_JOINING_OF_TENANT = 32
"""Instances of a tenant that join at a time while no other tenant has any; see `Places`."""
GUESSED_PACE_SECONDS = 0.02
"""Approximate duration of a snapshot of ten thousand chunks."""
GUESS_WEIGHT = 8
"""Weight of the guess, in observed joins."""
REMEMBERED_JOINS = 64
"""Older joins lose weight."""
TURNS_PER_JOIN = 2
"""Turns per join: with one, joins could never be faster than turns, and would be measured as slow for ever."""


class JoinAdmission:
    """Admits `limit` joining instances at a time, `share` of one tenant, and refuses others with a retry delay."""

    def __init__(self, limit: int = MAX_JOINING, share: int = MAX_JOINING_OF_TENANT) -> None:
        self._joining = Places[Instance]("places to join", limit, share)
        self._rushes: defaultdict[str, _Rush] = defaultdict(_Rush)
        """The current rush of each tenant."""

    def check(self, now: float, tenant: str = "") -> None:
        """Raises `Full` if no further instance may join now. Retry delays follow the current duration of joins."""
        try:
            self._joining.check(tenant)
        except Full:
            self._forget_joined(now)
        try:
            self._joining.check(tenant)
        except Full:
            raise Full(
                f"{len(self._joining)} instances are joining, {self._joining.count(tenant)} of them of this tenant; "
                "retry after the delay",
                retry_seconds=self._rushes[tenant].next_turn(now),
            ) from None

    def admit(self, instance: Instance, tenant: str = "") -> None:
        """Adds a joining instance, which `check` has admitted; it has joined once it is `synced`."""
        self._joining.take(instance, tenant)

    def leave(self, instance: Instance) -> None:
        """Removes an instance that is gone, was replaced, or reports its chunks elsewhere. Idempotent."""
        self._joining.release(instance)

    def of(self, tenant: str = "") -> TenantAdmission:
        """The part of one tenant."""
        return TenantAdmission(self, tenant)

    def _forget_joined(self, now: float) -> None:
        """Removes instances that have joined, or whose lease expired."""
        before = {tenant: self._joining.count(tenant) for tenant in self._rushes}
        for instance in list(self._joining):
            if instance.synced or instance.expire_time <= now:
                self._joining.release(instance)
        for tenant, count in before.items():
            rush, joining = self._rushes[tenant], self._joining.count(tenant)
            rush.joined(count - joining, now)
            if joining < self._joining.share // 2:
                rush.end()


class TenantAdmission:
    """The joining instances of one tenant."""

    def __init__(self, admission: JoinAdmission, tenant: str) -> None:
        self.tenant = tenant
        self._admission = admission

    def check(self, now: float) -> None:
        """Raises `Full` if no further instance may join now."""
        self._admission.check(now, self.tenant)

    def admit(self, instance: Instance) -> None:
        """Adds a joining instance, which `check` has admitted."""
        self._admission.admit(instance, self.tenant)

    def leave(self, instance: Instance) -> None:
        """Removes an instance. Idempotent."""
        self._admission.leave(instance)


class _Rush:
    """The instances of one tenant that join while others wait for their turn, and the turns of those."""

    def __init__(self) -> None:
        self._last_turn = 0.0
        self._since: float | None = None
        self._joined_count = 0.0

    def next_turn(self, now: float) -> float:
        """The delay after which one more instance may retry, in seconds."""
        if self._since is None:
            self._since, self._joined_count = now, 0.0
        seconds = GUESSED_PACE_SECONDS * GUESS_WEIGHT + now - self._since
        pace_seconds = seconds / (GUESS_WEIGHT + self._joined_count)
        self._last_turn = max(self._last_turn, now) + pace_seconds / TURNS_PER_JOIN
        return round(self._last_turn - now, 3)

    def joined(self, count: int, now: float) -> None:
        """Counts instances that have joined."""
        self._joined_count += count
        if self._since is not None and self._joined_count > REMEMBERED_JOINS:
            self._joined_count /= 2
            self._since += (now - self._since) / 2

    def end(self) -> None:
        """Few instances are joining: the next rush is measured from its own beginning."""
        self._since = None
