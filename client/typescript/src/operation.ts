/** Work that the coordinator does in the background, a move or a clear, as its caller sees it. */

import { createRegistry, equals, type Message } from "@bufbuild/protobuf";
import { type Any, anyUnpack, durationFromMs } from "@bufbuild/protobuf/wkt";

import type { Connections } from "./connections.js";
import { fromStatus, LmkvError } from "./errors.js";
import type { Operation as OperationMessage } from "./gen/google/longrunning/operations_pb.js";
import {
  type ClearProgress,
  ClearProgressSchema,
  type ClearResult,
  ClearResultSchema,
  type MoveProgress,
  MoveProgressSchema,
  type MoveResult,
  MoveResultSchema,
} from "./gen/lmkv/v1/cache_service_pb.js";
import { RetryDeadline } from "./retry-deadline.js";

/** More than the coordinator gives any operation. */
const WAIT_SECONDS = 900;
/** How often progress is told, if there is any. */
const POLL_SECONDS = 0.5;
/** How long the coordinator is asked to hold back an answer until there is something to tell. */
const HOLD_SECONDS = 20;

const KINDS = createRegistry(MoveProgressSchema, MoveResultSchema, ClearProgressSchema, ClearResultSchema);

export type OperationState = "running" | "done" | "failed" | "cancelled";

/**
 * An operation, in the state that it was last heard of: `wait`, `refresh` and iteration ask anew.
 *
 * It goes on whether or not anybody waits, and is known by its name for some time after its end. Every method throws
 * `OPERATION_NOT_FOUND` once it is not, and `UNREACHABLE`.
 *
 * Every coordinator knows it. If the one that sees it through is lost, another one does.
 */
export class Operation<
  Progress extends Message = Message,
  Result extends Message = Message,
> implements AsyncIterable<Progress> {
  /** `google.longrunning.Operation`. */
  message: OperationMessage;

  constructor(
    private readonly connections: Connections,
    message: OperationMessage,
  ) {
    this.message = message;
  }

  /** Its id, which LMCache calls `event_id`. */
  get name(): string {
    return this.message.name;
  }

  /** `move`, `copy` or `clear`: names begin with it. */
  get kind(): string {
    return this.name.split("-", 1)[0] ?? "";
  }

  /** Whether it is over, one way or the other. */
  get done(): boolean {
    return this.message.done;
  }

  /** How far it is. */
  get progress(): Progress {
    return unpack(this.message.metadata) as Progress;
  }

  /** What it did; undefined while it runs, and if it failed. */
  get result(): Result | undefined {
    const { result } = this.message;
    return result.case === "response" ? (unpack(result.value) as Result) : undefined;
  }

  /** Why it failed, `OPERATION_CANCELLED` if somebody wanted it to; undefined while it runs, and if it did not. */
  get error(): LmkvError | undefined {
    const { result } = this.message;
    return result.case === "error" ? fromStatus(result.value) : undefined;
  }

  get state(): OperationState {
    if (!this.done) return "running";
    if (!this.error) return "done";
    return this.error.code === "CANCELLED" ? "cancelled" : "failed";
  }

  /** Asks what has become of it. */
  async refresh(): Promise<void> {
    const request = { name: this.name };
    this.message = await this.connections.call((to, options) => to.operations.getOperation(request, options));
  }

  /** Asks for it to stop, which takes a moment: `wait` tells. What it has done so far stays done. */
  async cancel(): Promise<void> {
    const request = { name: this.name };
    await this.connections.call((to, options) => to.operations.cancelOperation(request, options));
  }

  /**
   * Waits for its end, also through the loss of its coordinator, and returns what it did.
   *
   * A result may list chunks that it failed for. Throws the error that the operation ended with, and a `DOMException`
   * called `TimeoutError` if it does not end in time; it then still runs.
   */
  async wait(timeoutSeconds = WAIT_SECONDS): Promise<Result> {
    const deadline = performance.now() + timeoutSeconds * 1000;
    const retryDeadline = new RetryDeadline();
    while (!this.done) {
      const left = (deadline - performance.now()) / 1000;
      if (left <= 0) {
        throw new DOMException(`${this.name} is still running after ${timeoutSeconds} s`, "TimeoutError");
      }
      await this.poll(Math.min(left, HOLD_SECONDS), retryDeadline);
    }
    if (this.result) return this.result;
    throw this.error ?? new LmkvError(`${this.name} has neither a result nor an error`, "INTERNAL", "INTERNAL");
  }

  /** Tells how far it is, now and whenever that has changed, until it is over. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Progress, void, void> {
    const deadline = new RetryDeadline();
    let told = this.progress;
    yield told;
    while (!this.done) {
      await this.poll(POLL_SECONDS, deadline);
      if (!areEqual(this.progress, told)) {
        told = this.progress;
        yield told;
      }
    }
  }

  /** Hears of it once it is over, or after so many seconds. */
  private async poll(seconds: number, deadline: RetryDeadline): Promise<void> {
    const request = { name: this.name, timeout: durationFromMs(Math.ceil(seconds * 1000)) };
    try {
      this.message = await this.connections.ask((to) =>
        to.call((options) => to.operations.waitOperation(request, options), seconds),
      );
      deadline.extend();
    } catch (error) {
      if (!(error instanceof LmkvError && error.reason === "UNREACHABLE")) throw error;
      await deadline.waitToRetry(error);
    }
  }
}

/** A move or a copy. */
export type MoveOperation = Operation<MoveProgress, MoveResult>;
export type ClearOperation = Operation<ClearProgress, ClearResult>;

function unpack(packed: Any | undefined): Message {
  const message = packed && anyUnpack(packed, KINDS);
  if (message) return message;
  const typeUrl = packed?.typeUrl ?? "nothing";
  throw new LmkvError(`this version of lmkv-client does not know what ${typeUrl} is`, "INTERNAL", "INTERNAL");
}

function areEqual(one: Message, other: Message): boolean {
  const kind = KINDS.getMessage(one.$typeName);
  return kind !== undefined && equals(kind, one, other);
}
