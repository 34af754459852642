// Transfers between instances, from their counters, and which counters increased recently.

import { serverNow } from "./api.js";

const RECENT_SECONDS = 15;

/** The last reported counters only, so that memory is limited to one response. */
export class Flows {
  #flows = new Map();
  #readers = new Set();
  #noted = -Infinity;

  /**
   * Applies the instances' counters; `now` is in seconds by any clock. Counters increase until an instance restarts, so
   * any change means new bytes since the last call; after a long pause none of them count as recent.
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
   * One flow per pair of instances, the largest first. Moves and copies only mark what runs, or ended so recently that
   * the counters may not include it yet: their bytes are in the counters.
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
