"""Instances and the chunks that they hold, kept consistent: each stream of reports is a snapshot that is staged and
installed as a whole, then changes in sequence. Called by handlers and the sweeper; time is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lmkv.errors import BadChunkKey, BadMessage, Full, ResyncRequired
from lmkv.internal.v1 import report_service_pb2
from lmkv.keys import KEY_BYTES, Digest, check_keys, check_prefix_digests
from lmkv_server.coordinator.core.instances import Instance, Instances, JoinAdmission, TenantAdmission
from lmkv_server.coordinator.core.layout_map import MAX_TOKENS, Change, LayoutMap, Snapshot, tier_number
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.layout_store.follower import ChunkLoader, InstanceFollower
from lmkv_server.coordinator.layout_store.publication import Publication
from lmkv_server.coordinator.layout_store.records import FINGERPRINT_BYTES


class ReportStream:
    """The reports of one `Report` call. Created by `Registry.open_stream` and `Registry.follow`."""

    def __init__(
        self,
        instances: Instances,
        layout: LayoutMap,
        instance: Instance,
        staged: Snapshot | None,
        publication: Publication | None,
    ) -> None:
        """`staged` is None if the instance reports its chunks to another coordinator."""
        self._instances = instances
        self._layout = layout
        self._instance = instance
        self._staged = staged
        self._reported_elsewhere = staged is None
        self._publication = publication
        self.sequence = 0
        """Sequence of the last report that was applied."""

    def apply(self, report: report_service_pb2.ReportRequest, now: float) -> None:
        """Applies a report and renews the instance's lease. A repeated report only renews the lease.

        Raises `InstanceNotFound`, `StaleEpoch`, `ResyncRequired`, `BadChunkKey`, `BadMessage`, `Full`; the stream
        cannot be used afterwards.
        """
        info = self._instance.info
        if (report.instance_id, report.epoch) != (info.instance_id, info.epoch):
            raise BadMessage(f"a stream of instance {info.instance_id!r} carries a report of another one")
        self._instances.get(info.instance_id, info.epoch)
        if self._instance.stream is not self:
            raise ResyncRequired(f"another stream of instance {info.instance_id!r} replaced this one")
        self._instances.renew(self._instance, now)
        if 0 < report.sequence <= self.sequence:
            return
        if report.sequence != self.sequence + 1:
            raise ResyncRequired(
                f"report {report.sequence} follows {self.sequence}; open a new stream with a snapshot",
                expected_sequence=self.sequence + 1,
                sequence=report.sequence,
            )
        self._apply_content(report)
        self.sequence = report.sequence

    def close(self) -> None:
        """Ends the stream. Installed chunks stay until the lease expires; an incomplete snapshot is discarded."""
        if self._staged is not None:
            self._layout.discard(self._staged)
            self._staged = None
        if self._instance.stream is self:
            self._instance.stream = None

    def _apply_content(self, report: report_service_pb2.ReportRequest) -> None:
        if self._reported_elsewhere:
            if report.snapshot or report.snapshot_end or report.changes:
                raise BadMessage("a stream with reported_elsewhere contains chunks")
        else:
            self._apply_chunks(report)

    def _apply_chunks(self, report: report_service_pb2.ReportRequest) -> None:
        if report.reported_elsewhere:
            raise BadMessage("reported_elsewhere is allowed in a stream's first report only")
        if (report.snapshot or report.snapshot_end) != (self._staged is not None):
            raise ResyncRequired(
                "changes arrived before the end of the snapshot"
                if self._staged is not None
                else "a snapshot arrived after its end; open a new stream with it"
            )
        changes = [self._apply_change(change) for change in report.changes]
        if self._staged is not None and report.snapshot_end:
            self._layout.install(self._staged)
            self._staged = None
            self._instance.synced = True
        digests = report.digests if self._staged is None else ()
        for claimed in digests:
            self._compare(claimed)
        if self._publication is not None:
            digest_values = [(tier_number(claimed.tier), claimed.chunk_count, claimed.key_sum) for claimed in digests]
            self._publication.publish_changes(changes, digest_values)
            if report.snapshot_end:
                self._publication.publish_complete()

    def _apply_change(self, change: report_service_pb2.ChunkChange) -> Change:
        tier = tier_number(change.tier)
        if not tier:
            raise BadMessage("a change names no tier", tier="")
        if len(change.fingerprint) not in (0, FINGERPRINT_BYTES):
            raise BadMessage(f"a fingerprint has {len(change.fingerprint)} bytes; it must have {FINGERPRINT_BYTES}")
        admitted = check_keys(change.admitted_keys, "admitted_keys")
        evicted = check_keys(change.evicted_keys, "evicted_keys")
        partials = _partial_token_counts(change)
        chunk_size = self._instance.chunk_size(change.fingerprint)
        if chunk_size > MAX_TOKENS:
            raise BadMessage(f"chunks of {chunk_size} tokens are longer than {MAX_TOKENS}", chunk_size=chunk_size)
        parents = _partial_parents(change, partials)
        digests = _prefix_digests(change, partials, chunk_size or MAX_TOKENS)
        applied = Change(tier, change.fingerprint, chunk_size, admitted, dict(partials), evicted, parents, digests)
        self._layout.apply(self._staged or self._instance.info.instance_id, applied)
        return applied

    def _compare(self, claimed: report_service_pb2.TierDigest) -> None:
        known = self._layout.digest(self._instance.info.instance_id, tier_number(claimed.tier))
        if known != Digest(chunk_count=claimed.chunk_count, key_sum=claimed.key_sum):
            raise ResyncRequired(
                f"the instance holds {claimed.chunk_count} chunks in {claimed.tier}, the layout map has "
                f"{known.chunk_count} or other keys; open a new stream with a snapshot",
                tier=claimed.tier,
                claimed_chunk_count=claimed.chunk_count,
                known_chunk_count=known.chunk_count,
            )


def _partial_token_counts(change: report_service_pb2.ChunkChange) -> Mapping[int, int]:
    counts = dict(change.partial_token_counts)
    admitted_count = len(change.admitted_keys) // KEY_BYTES
    for index, tokens in counts.items():
        if not (0 <= index < admitted_count and 0 < tokens <= MAX_TOKENS):
            raise BadMessage(f"partial_token_counts[{index}] = {tokens} is invalid", index=index, tokens=tokens)
    return counts


def _partial_parents(change: report_service_pb2.ChunkChange, partials: Mapping[int, int]) -> dict[int, bytes]:
    parents = dict(change.partial_parent_keys)
    for index, parent in parents.items():
        if index not in partials and index not in change.prefix_digests:
            raise BadMessage(
                f"partial_parent_keys[{index}] is of no chunk in partial_token_counts or prefix_digests", index=index
            )
        if len(parent) != KEY_BYTES:
            raise BadChunkKey(f"a parent key has {len(parent)} bytes, not {KEY_BYTES}", field="partial_parent_keys")
    return parents


def _prefix_digests(
    change: report_service_pb2.ChunkChange, partials: Mapping[int, int], chunk_size: int
) -> dict[int, bytes]:
    digests = dict(change.prefix_digests)
    for index, found in digests.items():
        if not 0 <= index < len(change.admitted_keys) // KEY_BYTES or index not in change.partial_parent_keys:
            raise BadMessage(f"prefix_digests[{index}] is of no chunk in partial_parent_keys", index=index)
        check_prefix_digests(found, partials.get(index, chunk_size))
    return digests


RETURN_SECONDS = 1.0
"""An instance whose registration was deferred is expected within this time after its turn."""


class DepartureListener(Protocol):
    """Learns of each instance that leaves or expires. `PendingOrders`, on a higher floor, is one."""

    def drop_instance(self, instance_id: str) -> None:
        """The instance left."""


class Registry:
    """The fleet as the coordinator knows it. Soft state: nodes report it again after a restart."""

    def __init__(
        self,
        *,
        lease_ttl: float,
        now: float,
        revision: int = 0,
        departures: DepartureListener | None = None,
        admission: TenantAdmission | None = None,
    ) -> None:
        self.instances = Instances(lease_ttl)
        self.layout = LayoutMap(revision)
        self.publications: dict[str, Publication] = {}
        """Publications of the instances that report here, by id, if the layout map is shared."""
        self.followers: dict[str, InstanceFollower] = {}
        """Followers of the instances that report to another coordinator, by id, if the layout map is shared."""
        self._complete_time = now + lease_ttl
        self._departures = departures
        self.admission = admission or JoinAdmission().of()

    def register(self, info: InstanceInfo, now: float, secret: bytes = b"") -> Instance:
        """Registers an instance; a newer epoch replaces an older one and its chunks.

        Raises as `Instances.register`, and `Full` if too many instances are joining.
        """
        self.instances.check_secret(info.instance_id, secret)
        before = self.instances.find(info.instance_id)
        joins = before is None or before.stream is None or before.info.epoch != info.epoch
        if joins:
            self._check_admission(info, now)
        instance = self.instances.register(info, now, secret)
        if before is not None and before is not instance:
            self._forget(before)
        if joins:
            self.instances.mark_unsynced(instance)
            self.admission.admit(instance)
        return instance

    def open_stream(
        self, instance_id: str, epoch: int, now: float, publication: Publication | None = None
    ) -> ReportStream:
        """Opens a stream of reports, which replaces an open one. Its changes are published through `publication`.

        Raises `InstanceNotFound`, `StaleEpoch`.
        """
        instance = self.instances.get(instance_id, epoch)
        self.unpublish(instance_id)
        self._unfollow(instance_id)
        if publication is not None:
            self.publications[instance_id] = publication
        self.instances.mark_unsynced(instance)
        return self._begin_stream(instance, now, self.layout.stage(instance_id), publication)

    def follow(self, instance_id: str, epoch: int, now: float, loader: ChunkLoader) -> ReportStream:
        """Opens a stream of an instance that reports its chunks to another coordinator, which publishes them.

        `loader` loads them whenever that is necessary. Raises `InstanceNotFound`, `StaleEpoch`.
        """
        instance = self.instances.get(instance_id, epoch)
        self.unpublish(instance_id)
        follower = self.followers.get(instance_id)
        if follower is None:
            self.followers[instance_id] = follower = InstanceFollower(self.instances, self.layout, instance, loader)
            follower.request_load()
        elif follower.is_current:
            instance.synced = True
        self.admission.leave(instance)
        return self._begin_stream(instance, now)

    def unpublish(self, instance_id: str) -> None:
        """Stops publishing an instance. Idempotent."""
        publication = self.publications.pop(instance_id, None)
        if publication is not None:
            publication.close()

    def stop_sharing(self) -> None:
        """Stops publishing and following all instances. Chunks of followed instances stay, but may be out of date."""
        for instance_id in list(self.publications):
            self.unpublish(instance_id)
        for instance_id, follower in list(self.followers.items()):
            self.instances.mark_unsynced(follower.instance)
            self._unfollow(instance_id)

    def deregister(self, instance_id: str, epoch: int) -> Instance:
        """Removes an instance and its chunks. Raises `InstanceNotFound`, `StaleEpoch`."""
        instance = self.instances.deregister(instance_id, epoch)
        self._forget(instance)
        return instance

    def expire(self, now: float) -> list[Instance]:
        """Removes the instances whose lease expired, with their chunks, and returns them."""
        gone = self.instances.expire(now)
        for instance in gone:
            self._forget(instance)
        return gone

    def is_partial(self, now: float) -> bool:
        """Whether instances may hold more than the layout map lists: some have not reported their snapshot yet."""
        return self.instances.has_unsynced() or now < self._complete_time

    def check(self) -> None:
        """Asserts the invariants. Reads everything: for tests."""
        self.instances.check()
        assert self.publications.keys().isdisjoint(self.followers)
        assert all(self.instances.find(instance_id) is one.instance for instance_id, one in self.followers.items())
        self.layout.check()

    def _check_admission(self, info: InstanceInfo, now: float) -> None:
        try:
            self.admission.check(now)
        except Full as full:
            back = now + full.retry_seconds + RETURN_SECONDS
            self._complete_time = max(self._complete_time, back)
            before = self.instances.find(info.instance_id)
            if before is not None and before.info.epoch == info.epoch:  # it must not call before then
                before.expire_time = max(before.expire_time, back)
            raise

    def _begin_stream(
        self,
        instance: Instance,
        now: float,
        staged: Snapshot | None = None,
        publication: Publication | None = None,
    ) -> ReportStream:
        self._end_stream(instance)
        self.instances.renew(instance, now)
        instance.stream = stream = ReportStream(self.instances, self.layout, instance, staged, publication)
        return stream

    def _unfollow(self, instance_id: str) -> None:
        follower = self.followers.pop(instance_id, None)
        if follower is not None:
            follower.close()

    def _forget(self, instance: Instance) -> None:
        self.admission.leave(instance)
        self._end_stream(instance)
        self._unfollow(instance.info.instance_id)
        publication = self.publications.pop(instance.info.instance_id, None)
        if publication is not None:
            publication.publish_gone()
        self.layout.drop_instance(instance.info.instance_id)
        if self._departures:
            self._departures.drop_instance(instance.info.instance_id)

    def _end_stream(self, instance: Instance) -> None:
        if isinstance(instance.stream, ReportStream):
            instance.stream.close()
