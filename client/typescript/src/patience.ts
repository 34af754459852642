/** How long something that goes on by itself may be without an answer before it gives up. */

import { setTimeout } from "node:timers/promises";

/** A coordinator that restarts is back long before. */
export const PATIENCE_SECONDS = 30;
const RETRY_SECONDS = 0.2;

export class Patience {
  private end = 0;

  constructor(private readonly seconds = PATIENCE_SECONDS) {
    this.renew();
  }

  /** Begins anew: there was an answer. */
  renew(): void {
    this.end = performance.now() + this.seconds * 1000;
  }

  /** Waits a moment before another try. Throws the error once patience is over. */
  async endure(error: Error): Promise<void> {
    if (performance.now() > this.end) throw error;
    await setTimeout(RETRY_SECONDS * 1000);
  }
}
