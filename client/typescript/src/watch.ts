/** Watches the layout map: a snapshot, then every change, across restarts and losses. */

import type { Connections } from "./connections.js";
import type { LayoutChange } from "./gen/lmkv/v1/cache_service_pb.js";
import { RetryDeadline } from "./retry-deadline.js";

/** One update of a watch. Without changes it is a bookmark: there were no changes up to `revision`. */
export interface LayoutUpdate {
  /** Revision to resume from with `watch`; not valid within a snapshot. */
  revision: bigint;
  /** Whether a snapshot begins with this update: discard all earlier state. */
  reset: boolean;
  /** Whether the changes are part of a snapshot. */
  snapshot: boolean;
  changes: LayoutChange[];
}

/** Options of `Coordinator.watch`. */
export interface WatchOptions {
  /** Changes after this revision only; 0 or undefined begins with a snapshot. */
  startRevision?: bigint;
  /** Fingerprint of a spec, 16 bytes: excludes the chunks of all others. */
  fingerprint?: Uint8Array;
  /** Time for reconnections after a loss. */
  retrySeconds?: number;
  /** Ends the watch without an error. */
  signal?: AbortSignal;
}

/** See `Coordinator.watch`. */
export async function* watch(
  connections: Connections,
  { startRevision = 0n, fingerprint = new Uint8Array(), retrySeconds, signal }: WatchOptions,
): AsyncGenerator<LayoutUpdate, void, void> {
  const deadline = new RetryDeadline(retrySeconds);
  const ending = new AbortController();
  const end = signal ? AbortSignal.any([ending.signal, signal]) : ending.signal;
  let revision = startRevision;
  let toldBy = connections.current;
  try {
    for (;;) {
      const connection = connections.current;
      if (connection !== toldBy) {
        revision = 0n; // revisions are a coordinator's own
        toldBy = connection;
      }
      let reset = revision === 0n;
      try {
        const request = { startRevision: revision, fingerprint };
        for await (const response of connection.cache.watch(request, connection.until(end))) {
          deadline.extend();
          yield { revision: response.revision, reset, snapshot: response.snapshot, changes: response.changes };
          reset = false;
          if (!response.snapshot) revision = response.revision; // an incomplete snapshot is discarded
        }
      } catch (thrown) {
        if (end.aborted) return;
        const error = connection.meaningOf(thrown);
        if (error.reason === "REVISION_COMPACTED" || error.reason === "WATCHER_TOO_SLOW") {
          revision = 0n;
          continue;
        }
        if (error.reason !== "UNREACHABLE") throw error;
        connections.failed(connection);
        await deadline.waitToRetry(error);
        continue;
      }
      connections.failed(connection);
      await deadline.waitToRetry(connection.unreachable("it ended the watch"));
    }
  } finally {
    ending.abort();
  }
}
