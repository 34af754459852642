"""Instances and the chunks that they hold, kept consistent. Called by handlers and the sweeper; time is passed in."""

from __future__ import annotations

from collections.abc import Callable

from lmkv.errors import Full
from lmkv_server.coordinator.core.instance_info import InstanceInfo
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.join_admission import JoinAdmission
from lmkv_server.coordinator.core.layout_map import LayoutMap, Snapshot
from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.publication import Publication
from lmkv_server.coordinator.registry.report_stream import ReportStream

RETURN_SECONDS = 1.0
"""An instance whose registration was deferred is expected within this time after its turn."""


class Registry:
    """The fleet as the coordinator knows it. Soft state: nodes report it again after a restart."""

    def __init__(
        self,
        *,
        lease_ttl: float,
        now: float,
        revision: int = 0,
        on_gone: Callable[[str], None] = lambda _: None,
        admission: JoinAdmission | None = None,
        tenant: str = "",
    ) -> None:
        """`on_gone` is called with the id of each instance that leaves or expires. Tenants may share `admission`."""
        self.instances = Instances(lease_ttl)
        self.layout = LayoutMap(revision)
        self.publications: dict[str, Publication] = {}
        """With a shared layout map: publications of the instances that report here, by id."""
        self.followers: dict[str, InstanceFollower] = {}
        """With a shared layout map: followers of the instances that report to another coordinator, by id."""
        self._complete_time = now + lease_ttl
        self._on_gone = on_gone
        self._admission = admission or JoinAdmission()
        self.tenant = tenant
        self._unsynced: dict[str, Instance] = {}
        """Instances that were not synced at the last check."""

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
            instance.synced = False
            self._unsynced[info.instance_id] = instance
            self._admission.admit(instance, self.tenant)
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
        self._mark_unsynced(instance)
        return self._begin_stream(instance, now, self.layout.stage(instance_id), publication)

    def follow(
        self, instance_id: str, epoch: int, now: float, load: Callable[[InstanceFollower], None]
    ) -> ReportStream:
        """Opens a stream of an instance that reports its chunks to another coordinator, which publishes them.

        `load` is called whenever they have to be loaded. Raises `InstanceNotFound`, `StaleEpoch`.
        """
        instance = self.instances.get(instance_id, epoch)
        self.unpublish(instance_id)
        follower = self.followers.get(instance_id)
        if follower is None:
            self.followers[instance_id] = follower = InstanceFollower(
                self.layout, instance, on_load_request=load, on_unsynced=self._mark_unsynced
            )
            follower.request_load()
        elif follower.is_current:
            instance.synced = True
        self._admission.leave(instance)
        return self._begin_stream(instance, now)

    def unpublish(self, instance_id: str) -> None:
        """Stops publishing an instance. Idempotent."""
        publication = self.publications.pop(instance_id, None)
        if publication is not None:
            publication.close()

    def stop_sharing(self) -> None:
        """Stops publishing and following all instances. Chunks of followed ones stay, but may be out of date."""
        for instance_id in list(self.publications):
            self.unpublish(instance_id)
        for instance_id, follower in list(self.followers.items()):
            self._mark_unsynced(follower.instance)
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
        while self._unsynced:  # does not read all instances: every lookup calls it
            instance_id, instance = next(reversed(self._unsynced.items()))
            if not instance.synced:
                return True
            del self._unsynced[instance_id]
        return now < self._complete_time

    def check(self) -> None:
        """Asserts the invariants. Reads everything: for tests."""
        self.instances.check()
        not_synced = {instance.info.instance_id for instance in self.instances if not instance.synced}
        assert not_synced <= self._unsynced.keys()
        assert all(self.instances.find(instance_id) is one for instance_id, one in self._unsynced.items())
        assert self.publications.keys().isdisjoint(self.followers)
        assert all(self.instances.find(instance_id) is one.instance for instance_id, one in self.followers.items())
        self.layout.check()

    def _check_admission(self, info: InstanceInfo, now: float) -> None:
        try:
            self._admission.check(now, self.tenant)
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

    def _mark_unsynced(self, instance: Instance) -> None:
        instance.synced = False
        self._unsynced[instance.info.instance_id] = instance

    def _unfollow(self, instance_id: str) -> None:
        follower = self.followers.pop(instance_id, None)
        if follower is not None:
            follower.close()

    def _forget(self, instance: Instance) -> None:
        self._admission.leave(instance)
        self._end_stream(instance)
        self._unfollow(instance.info.instance_id)
        publication = self.publications.pop(instance.info.instance_id, None)
        if publication is not None:
            publication.publish_gone()
        self._unsynced.pop(instance.info.instance_id, None)
        self.layout.drop_instance(instance.info.instance_id)
        self._on_gone(instance.info.instance_id)

    def _end_stream(self, instance: Instance) -> None:
        if isinstance(instance.stream, ReportStream):
            instance.stream.close()
