"""The coordinator's core: instances and what they hold, kept in step. Pure; handlers and the sweeper call it."""

from __future__ import annotations

from collections.abc import Callable

from lmkv.errors import Full
from lmkv_server.coordinator.admission import Admission
from lmkv_server.coordinator.instances import Instance, Instances, Registration
from lmkv_server.coordinator.layout_map import LayoutMap
from lmkv_server.coordinator.report_stream import ReportStream

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
        admission: Admission | None = None,
    ) -> None:
        """`on_gone` is told the id of each instance that leaves, whatever the way; `admission` says who may join."""
        self.instances = Instances(lease_ttl)
        self.layout = LayoutMap(revision)
        self._settled_time = now + lease_ttl
        self._on_gone = on_gone
        self._admission = admission or Admission()
        self._unsettled: dict[str, Instance] = {}
        """Instances whose snapshot was not in when last looked at."""

    def register(self, said: Registration, now: float) -> Instance:
        """Takes an instance in; a newer epoch's predecessor is forgotten with all it held.

        Raises as `Instances`, and `Full` if it has to wait for its turn to tell what it holds.
        """
        before = self.instances.find(said.instance_id)
        joins = before is None or before.stream is None or before.said.epoch != said.epoch
        if joins:
            self._check_admission(now)
        instance = self.instances.register(said, now)
        if before is not None and before is not instance:
            self._forget(before)
        if joins:
            instance.synced = False
            self._unsettled[said.instance_id] = instance
            self._admission.admit(instance)
        return instance

    def _check_admission(self, now: float) -> None:
        try:
            self._admission.check(now)
        except Full as full:
            self._settled_time = max(self._settled_time, now + full.retry_seconds + COMING_BACK_SECONDS)
            raise

    def open_stream(self, instance_id: str, epoch: int, now: float) -> ReportStream:
        """Begins a stream of reports; one that is already open is superseded.

        Raises `InstanceNotFound`, `StaleEpoch`.
        """
        instance = self.instances.get(instance_id, epoch)
        self._end_stream(instance)
        self.instances.renew(instance, now)
        stream = ReportStream(self.instances, self.layout, instance)
        instance.stream = stream
        instance.synced = False
        self._unsettled[instance_id] = instance
        return stream

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
        unsynced = {instance.said.instance_id for instance in self.instances if not instance.synced}
        assert unsynced <= self._unsettled.keys()
        assert all(self.instances.find(instance_id) is one for instance_id, one in self._unsettled.items())
        self.layout.check()

    def _forget(self, instance: Instance) -> None:
        self._end_stream(instance)
        self._unsettled.pop(instance.said.instance_id, None)
        self.layout.drop_instance(instance.said.instance_id)
        self._on_gone(instance.said.instance_id)

    def _end_stream(self, instance: Instance) -> None:
        if isinstance(instance.stream, ReportStream):
            instance.stream.close()
