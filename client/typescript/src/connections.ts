/** The connections to all coordinators of a fleet; one is used until it does not answer. */

import type { CallOptions } from "@connectrpc/connect";

import { Connection, type ConnectionOptions } from "./connection.js";
import { LmkvError } from "./errors.js";

/**
 * One `Connection` for each address. Every coordinator knows the same chunks and instances, so any will do for a new
 * question. An operation is known to the coordinator that started it.
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

  /** Asks one after the other, each once, until one knows the operation. Throws `OPERATION_NOT_FOUND` if none does. */
  async find<Answer>(question: (to: Connection) => Promise<Answer>): Promise<Answer> {
    let unknown: unknown;
    let silent: unknown;
    for (const connection of [...this.all.slice(this.at), ...this.all.slice(0, this.at)]) {
      try {
        return await question(connection);
      } catch (error) {
        if (error instanceof LmkvError && error.reason === "OPERATION_NOT_FOUND") {
          unknown = error;
        } else if (connection.isSilent(error)) {
          this.failed(connection);
          silent ??= error;
        } else {
          throw error;
        }
      }
    }
    throw unknown ?? silent;
  }

  /** The answers of all that answer. Throws if none does. */
  async askAll<Answer>(question: (to: Connection) => Promise<Answer>): Promise<Answer[]> {
    const results = await Promise.allSettled(this.all.map(question));
    const answers = results.flatMap((result) => (result.status === "fulfilled" ? [result.value] : []));
    this.all.forEach((connection, index) => {
      const result = results[index];
      if (result?.status === "rejected" && (answers.length === 0 || !connection.isSilent(result.reason))) {
        throw result.reason;
      }
    });
    return answers;
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
