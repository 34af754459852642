"""One stream of reports: a snapshot that is staged and installed as a whole, then changes in sequence."""

from __future__ import annotations

from collections.abc import Mapping

from lmkv.errors import BadChunkKey, BadMessage, ResyncRequired
from lmkv.internal.v1 import report_service_pb2
from lmkv.keys import KEY_BYTES, Digest, check_keys, check_prefix_digests
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.layout_map import MAX_TOKENS, Change, LayoutMap, Snapshot, tier_number
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
