"""The coordinator's core: instances and what they hold, kept in step. Pure; handlers and the sweeper call it."""

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

COMING_BACK_SECONDS = 1.0
"""How long after its turn an instance that was put off is expected at the latest."""


class Registry:
    """The fleet as the coordinator knows it. All of it is soft state: nodes tell it anew after a restart."""

    def __init__(
        self,
        *,
        lease_ttl: float,
        now: float,
        revision: int = 0,
        on_gone: Callable[[str], None] = lambda _: None,
        admission: JoinAdmission | None = None,
    ) -> None:
        """`on_gone` is told the id of each instance that leaves, whatever the way; `admission` says who may join."""
        self.instances = Instances(lease_ttl)
        self.layout = LayoutMap(revision)
        self.publications: dict[str, Publication] = {}
        """What is published of instances that tell their chunks here, where coordinators share a layout map."""
        self.followers: dict[str, InstanceFollower] = {}
        """Instances that tell their chunks to another one of these."""
        self._settled_time = now + lease_ttl
        self._on_gone = on_gone
        self._admission = admission or JoinAdmission()
        self._unsettled: dict[str, Instance] = {}
        """Instances whose snapshot was not in when last looked at."""

    def register(self, info: InstanceInfo, now: float, secret: bytes = b"") -> Instance:
        """Takes an instance in; a newer epoch's predecessor is forgotten with all it held.

        Raises as `Instances`, and `Full` if it has to wait for its turn to tell what it holds.
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
            self._unsettled[info.instance_id] = instance
            self._admission.admit(instance)
        return instance

    def open_stream(
        self, instance_id: str, epoch: int, now: float, publication: Publication | None = None
    ) -> ReportStream:
        """Begins a stream of reports; one that is already open is superseded. What it tells is published, if it can.

        Raises `InstanceNotFound`, `StaleEpoch`.
        """
        instance = self.instances.get(instance_id, epoch)
        self.unpublish(instance_id)
        self._unfollow(instance_id)
        if publication is not None:
            self.publications[instance_id] = publication
        self._unsettle(instance)
        return self._begin_stream(instance, now, self.layout.stage(instance_id), publication)

    def follow(
        self, instance_id: str, epoch: int, now: float, load: Callable[[InstanceFollower], None]
    ) -> ReportStream:
        """Begins a stream without chunks: another coordinator is told these, and publishes them.

        `load` is called whenever they have to be loaded. Raises `InstanceNotFound`, `StaleEpoch`.
        """
        instance = self.instances.get(instance_id, epoch)
        self.unpublish(instance_id)
        follower = self.followers.get(instance_id)
        if follower is None:
            self.followers[instance_id] = follower = InstanceFollower(
                self.layout, instance, on_load_request=load, on_unsynced=self._unsettle
            )
            follower.request_load()
        elif follower.is_current:
            instance.synced = True
        self._admission.leave(instance)
        return self._begin_stream(instance, now)

    def unpublish(self, instance_id: str) -> None:
        """Publishes no more of an instance; one that is not published is no error."""
        publication = self.publications.pop(instance_id, None)
        if publication is not None:
            publication.close()

    def stop_sharing(self) -> None:
        """Publishes and follows nobody any more. What followed ones hold stays, but may be less than there is."""
        for instance_id in list(self.publications):
            self.unpublish(instance_id)
        for instance_id, follower in list(self.followers.items()):
            self._unsettle(follower.instance)
            self._unfollow(instance_id)

    def deregister(self, instance_id: str, epoch: int) -> Instance:
        """Lets an instance leave with all it held. Raises `InstanceNotFound`, `StaleEpoch`."""
        instance = self.instances.deregister(instance_id, epoch)
        self._forget(instance)
        return instance

    def expire(self, now: float) -> list[Instance]:
        """Drops the instances whose lease has run out with all they held, and returns them."""
        gone = self.instances.expire(now)
        for instance in gone:
            self._forget(instance)
        return gone

    def is_partial(self, now: float) -> bool:
        """Whether more may be held than the layout map says: somebody is, or may be, still reporting."""
        while self._unsettled:  # not all instances are looked at: every lookup asks this
            instance_id, instance = next(reversed(self._unsettled.items()))
            if not instance.synced:
                return True
            del self._unsettled[instance_id]
        return now < self._settled_time

    def check(self) -> None:
        """Asserts what must hold between any two calls. Reads everything: for tests."""
        self.instances.check()
        unsynced = {instance.info.instance_id for instance in self.instances if not instance.synced}
        assert unsynced <= self._unsettled.keys()
        assert all(self.instances.find(instance_id) is one for instance_id, one in self._unsettled.items())
        assert self.publications.keys().isdisjoint(self.followers)
        assert all(self.instances.find(instance_id) is one.instance for instance_id, one in self.followers.items())
        self.layout.check()

    def _check_admission(self, info: InstanceInfo, now: float) -> None:
        try:
            self._admission.check(now)
        except Full as full:
            back = now + full.retry_seconds + COMING_BACK_SECONDS
            self._settled_time = max(self._settled_time, back)
            before = self.instances.find(info.instance_id)
            if before is not None and before.info.epoch == info.epoch:  # it is told to be silent until then
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

    def _unsettle(self, instance: Instance) -> None:
        instance.synced = False
        self._unsettled[instance.info.instance_id] = instance

    def _unfollow(self, instance_id: str) -> None:
        follower = self.followers.pop(instance_id, None)
        if follower is not None:
            follower.close()

    def _forget(self, instance: Instance) -> None:
        self._end_stream(instance)
        self._unfollow(instance.info.instance_id)
        publication = self.publications.pop(instance.info.instance_id, None)
        if publication is not None:
            publication.publish_gone()
        self._unsettled.pop(instance.info.instance_id, None)
        self.layout.drop_instance(instance.info.instance_id)
        self._on_gone(instance.info.instance_id)

    def _end_stream(self, instance: Instance) -> None:
        if isinstance(instance.stream, ReportStream):
            instance.stream.close()
