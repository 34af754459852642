/** Following the layout map: a snapshot, then every change, through restarts and losses. */

import type { Connections } from "./connections.js";
import type { LayoutChange } from "./gen/lmkv/v1/cache_service_pb.js";
import { RetryDeadline } from "./retry-deadline.js";

/** What a watcher learns at once. Without changes it is a bookmark: nothing happened up to `revision`. */
export interface LayoutUpdate {
  /** What to give `watch` to go on from here; not from within a snapshot. */
  revision: bigint;
  /** Whether a snapshot begins with this update: all that was known before is void. */
  reset: boolean;
  /** Whether the changes are part of a snapshot. */
  snapshot: boolean;
  changes: LayoutChange[];
}

/** What `Coordinator.watch` takes. */
export interface WatchOptions {
  /** Only what changed after this revision; 0, or nothing, asks for all that is held first. */
  startRevision?: bigint;
  /** Fingerprint of a spec, 16 bytes: leaves out the chunks of all others. */
  fingerprint?: Uint8Array;
  /** How long the coordinator may stay away. */
  retrySeconds?: number;
  /** Ends the watch, quietly. */
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
          if (!response.snapshot) revision = response.revision; // a snapshot that breaks off is worth nothing
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
