/** The connections to all coordinators of a fleet; one is used until it does not answer. */

import type { CallOptions } from "@connectrpc/connect";

import { Connection, type ConnectionOptions } from "./connection.js";

/**
 * One `Connection` for each address. Every coordinator knows the same, so any will do for a new question.
 *
 * A stream that began at one of them is that one's: it keeps the `Connection` that it began on.
 */
export class Connections {
  private readonly all: [Connection, ...Connection[]];
  private at = 0;

  constructor([address, ...others]: readonly [string, ...string[]], options: ConnectionOptions) {
    this.all = [new Connection(address, options), ...others.map((other) => new Connection(other, options))];
  }

  /** The current connection. */
  get current(): Connection {
    return this.all[this.at] ?? this.all[0];
  }

  close(): void {
    for (const connection of this.all) connection.close();
  }

  /** One did not answer: the next is asked from here on, unless another one is already. */
  failed(connection: Connection): void {
    if (connection === this.current) this.at = (this.at + 1) % this.all.length;
  }

  /** The answer of the first that gives one, each within its time. Throws as `Connection.call` does. */
  async call<Response>(method: (to: Connection, options: CallOptions) => Promise<Response>): Promise<Response> {
    return await this.ask((to) => to.call((options) => method(to, options)));
  }

  /** Asks one after the other, each once, until one answers. */
  async ask<Answer>(question: (to: Connection) => Promise<Answer>): Promise<Answer> {
    for (let left = this.all.length - 1; left > 0; left--) {
      const connection = this.current;
      try {
        return await question(connection);
      } catch (error) {
        if (!connection.isSilent(error)) throw error; // an answer, even if it reports another process as unreachable
        this.failed(connection);
      }
    }
    return await question(this.current);
  }
}
