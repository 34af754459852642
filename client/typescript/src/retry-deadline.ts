/** Bounds the time of retries after the last response. */

import { setTimeout } from "node:timers/promises";

/** Much longer than the restart of a coordinator takes. */
export const RETRY_TIMEOUT_SECONDS = 30;
const RETRY_SECONDS = 0.2;

export class RetryDeadline {
  private end = 0;

  constructor(private readonly seconds = RETRY_TIMEOUT_SECONDS) {
    this.extend();
  }

  /** Restarts the time, after a response. */
  extend(): void {
    this.end = performance.now() + this.seconds * 1000;
  }

  /** Waits before the next attempt. Throws the error if the time is over. */
  async waitToRetry(error: Error): Promise<void> {
    if (performance.now() > this.end) throw error;
    await setTimeout(RETRY_SECONDS * 1000);
  }
}
