// What instances fetched from each other, by their own counts, and which counts have risen lately.

import { serverNow } from "./api.js";

const RECENT_SECONDS = 15;

/** The counts that were last told, and no older ones: what is kept is as much as one answer. */
export class Flows {
  #flows = new Map();
  #readers = new Set();
  #noted = -Infinity;

  /**
   * Takes in what instances tell; `now` is in seconds by any clock. Counts rise until an instance starts again, so any
   * other count than before tells of new bytes. They came after the last look: after a long one nothing counts as recent.
   */
  note(instances, now) {
    const flows = new Map();
    for (const { instanceId, stats } of instances) {
      for (const { instanceId: peer, chunkCount = 0, transferredBytes } of stats?.traffic ?? []) {
        const flow = { from: peer, to: instanceId, chunks: Number(chunkCount), bytes: Number(transferredBytes ?? 0) };
        const key = keyOf(flow);
        const last = this.#flows.get(key);
        const isNew = this.#readers.has(instanceId) && flow.bytes !== (last?.bytes ?? 0);
        flows.set(key, { key, ...flow, risen: isNew ? this.#noted : (last?.risen ?? -Infinity) });
      }
    }
    this.#flows = flows;
    this.#readers = new Set(instances.map((instance) => instance.instanceId));
    this.#noted = now;
  }

  /**
   * One flow for each two ends, of most bytes first. Moves and copies say only what runs, or ended so lately that the
   * counts may not have told yet: their bytes are in the counts.
   */
  list(operations) {
    const flows = new Map();
    for (const [key, flow] of this.#flows) {
      if (!flow.chunks || flow.from === flow.to) continue;
      flows.set(key, { ...flow, isRunning: false, isRecent: this.#noted - flow.risen < RECENT_SECONDS });
    }
    for (const { source, destination, done, endTime, bytes } of operations) {
      if (!source || !destination || source.instanceId === destination.instanceId) continue;
      if (done && (!bytes || serverNow() - endTime >= RECENT_SECONDS)) continue;
      const ends = { from: source.instanceId, to: destination.instanceId };
      const key = keyOf(ends);
      const flow = flows.get(key) ?? { key, ...ends, chunks: 0, bytes: 0, isRunning: false };
      flows.set(key, { ...flow, isRunning: flow.isRunning || !done, isRecent: true });
    }
    return [...flows.values()].sort((one, other) => other.bytes - one.bytes);
  }
}

const keyOf = ({ from, to }) => JSON.stringify([from, to]);
