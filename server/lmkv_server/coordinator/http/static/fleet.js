// The page's state of the fleet. It polls while the page is visible, and slower without answers.

import { RPC, call, list, metrics, seconds, serverNow } from "./api.js";
import { Flows } from "./flows.js";
import { Ledger } from "./ledger.js";

const PERIOD_MS = 1_500;
const BACKOFF_MS = [500, 1_000, 2_000, 4_000, 8_000];
/** Least ratio of the time between polls to the time of a poll: a large fleet is polled more rarely. */
const IDLE_FACTOR = 5;
const METRICS_EVERY = 4;
const RENEWAL_SECONDS = 0.05;
/** Jitter of reported lease ends; a larger difference is a renewed lease. */

/** Calls `change` after each poll, successful or not. */
export class Fleet extends EventTarget {
  instances = [];
  pins = [];
  revision = 0;
  partial = false;
  lookups = NaN;
  hits = NaN;
  /** The error of the last poll; null if it succeeded. */
  lost = null;
  /** Whether a poll ever succeeded. */
  isKnown = false;

  #flows = new Flows();
  #ledger = new Ledger();
  #renewals = new Map();
  #rounds = 0;
  #failures = 0;
  #timer = 0;
  #isAsking = false;
  #again = false;

  get operations() {
    return this.#ledger.operations;
  }

  /** What instances fetched from each other; see `Flows.list`. */
  get flows() {
    return this.#flows.list(this.operations);
  }

  /** Starts polling. */
  start() {
    document.addEventListener("visibilitychange", () => this.refresh());
    this.refresh();
  }

  /** Polls now, or again after the running poll; its result comes with a later `change`. */
  async refresh() {
    clearTimeout(this.#timer);
    this.#again = this.#isAsking;
    if (this.#isAsking || document.hidden) return;
    this.#isAsking = true;
    const began = performance.now();
    try {
      await this.#round();
    } finally {
      this.#isAsking = false;
    }
    const backoff = BACKOFF_MS[Math.min(this.#failures, BACKOFF_MS.length) - 1];
    const pause = backoff ?? Math.max(PERIOD_MS, IDLE_FACTOR * (performance.now() - began));
    this.#timer = setTimeout(() => this.refresh(), this.#again ? 0 : pause);
  }

  /** Seconds that an instance's report is overdue; 0 while it reports in time. */
  silence(instance) {
    const { isLate, noticed } = this.#renewals.get(instance.instanceId) ?? {};
    return isLate ? (performance.now() - noticed) / 1000 : 0;
  }

  /** Names of the served models. */
  models() {
    const names = this.instances.flatMap((instance) => (instance.specs ?? []).map((spec) => spec.modelName));
    return [...new Set(names)].filter(Boolean).sort();
  }

  async #round() {
    try {
      const [instances, pins, layout] = await Promise.all([
        list(RPC.instances, "instances"),
        list(RPC.pins, "pins"),
        call(RPC.lookup),
        this.#ledger.sync(this.lost !== null),
        this.#readMetrics(),
      ]);
      this.instances = instances;
      this.pins = pins;
      this.revision = Number(layout.revision ?? 0);
      this.isComplete = layout.isComplete ?? false;
      this.#flows.note(instances, performance.now() / 1000);
      this.#noteRenewals();
      this.#failures = 0;
      this.lost = null;
      this.isKnown = true;
    } catch (error) {
      this.#failures += 1;
      this.lost = error.message;
    }
    this.dispatchEvent(new Event("change"));
  }

  async #readMetrics() {
    if (this.#rounds++ % METRICS_EVERY && !this.lost) return;
    const prefix = "lmkv_coordinator_";
    [this.hits, this.lookups] = await metrics([`${prefix}lookup_hits_total`, `${prefix}lookup_seconds_count`]);
  }

  /**
   * A report renews the lease, so a later end of the lease means a report. There are several reports per lease: one with
   * less than half of its time left is overdue.
   */
  #noteRenewals() {
    const noticed = performance.now();
    const renewals = new Map();
    for (const { instanceId, epoch, expireTime } of this.instances) {
      const expiry = seconds(expireTime);
      const last = this.#renewals.get(instanceId);
      const left = expiry - serverNow();
      const isSame = last?.epoch === epoch && expiry - last.expiry < RENEWAL_SECONDS;
      const renewal = isSame ? last : { epoch, expiry, noticed, lease: Math.max(left, last?.lease ?? 0) };
      renewals.set(instanceId, { ...renewal, isLate: left < renewal.lease / 2 });
    }
    this.#renewals = renewals;
  }
}
