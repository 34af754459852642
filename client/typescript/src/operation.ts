/** Long-running operations of the coordinator: move, copy and clear. */

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
  type DrainProgress,
  DrainProgressSchema,
  type DrainResult,
  DrainResultSchema,
  type MoveProgress,
  MoveProgressSchema,
  type MoveResult,
  MoveResultSchema,
} from "./gen/lmkv/v1/cache_service_pb.js";
import { RetryDeadline } from "./retry-deadline.js";

/** Longer than the maximum duration of an operation. */
const WAIT_SECONDS = 900;
/** Interval of progress updates. */
const POLL_SECONDS = 0.5;
/** Maximum time that the coordinator waits for a change before it answers. */
const HOLD_SECONDS = 20;

const KINDS = createRegistry(
  MoveProgressSchema,
  MoveResultSchema,
  ClearProgressSchema,
  ClearResultSchema,
  DrainProgressSchema,
  DrainResultSchema,
);

export type OperationState = "running" | "done" | "failed" | "cancelled";

/**
 * An operation in its last known state; `wait`, `refresh` and iteration update it.
 *
 * It runs independently of its clients, and keeps its name for some time after its end. All methods throw
 * `OPERATION_NOT_FOUND` after that, and `UNREACHABLE`.
 *
 * If the coordinator that runs it is lost, who started it and waits for it, or iterates over it, repeats the request
 * there or at another one: it continues under another name. Everyone else gets `OPERATION_NOT_FOUND`.
 */
export class Operation<
  Progress extends Message = Message,
  Result extends Message = Message,
> implements AsyncIterable<Progress> {
  /** `google.longrunning.Operation`. */
  message: OperationMessage;

  private readonly repeatUntil = performance.now() + WAIT_SECONDS * 1000;

  /** `repeat` starts it again with the same request id, if it was started here. */
  constructor(
    private readonly connections: Connections,
    message: OperationMessage,
    private readonly repeat?: () => Promise<OperationMessage>,
  ) {
    this.message = message;
  }

  /** Its id, which LMCache calls `event_id`. */
  get name(): string {
    return this.message.name;
  }

  /** `move`, `copy`, `clear` or `drain`: names begin with it. */
  get kind(): string {
    return this.name.split("-", 1)[0] ?? "";
  }

  /** Whether it has ended. */
  get done(): boolean {
    return this.message.done;
  }

  /** Its progress. */
  get progress(): Progress {
    return unpack(this.message.metadata) as Progress;
  }

  /** Its result; undefined while it runs or if it failed. */
  get result(): Result | undefined {
    const { result } = this.message;
    return result.case === "response" ? (unpack(result.value) as Result) : undefined;
  }

  /** Its error, `OPERATION_CANCELLED` if it was cancelled; undefined while it runs or if it succeeded. */
  get error(): LmkvError | undefined {
    const { result } = this.message;
    return result.case === "error" ? fromStatus(result.value) : undefined;
  }

  get state(): OperationState {
    if (!this.done) return "running";
    if (!this.error) return "done";
    return this.error.code === "CANCELLED" ? "cancelled" : "failed";
  }

  /** Updates its state. */
  async refresh(): Promise<void> {
    const request = { name: this.name };
    this.message = await this.connections.find((to) =>
      to.call((options) => to.operations.getOperation(request, options)),
    );
  }

  /** Requests its cancellation; `wait` returns when it has ended. Finished work is not undone. */
  async cancel(): Promise<void> {
    const request = { name: this.name };
    await this.connections.find((to) => to.call((options) => to.operations.cancelOperation(request, options)));
  }

  /**
   * Waits for its end, across failovers of coordinators, and returns its result.
   *
   * A result may list chunks that failed. Throws the error that the operation ended with, and a `DOMException`
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

  /** Yields its progress, now and after each change, until it ends. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Progress, void, void> {
    const deadline = new RetryDeadline();
    let last = this.progress;
    yield last;
    while (!this.done) {
      await this.poll(POLL_SECONDS, deadline);
      if (!areEqual(this.progress, last)) {
        last = this.progress;
        yield last;
      }
    }
  }

  /** Updates its state when it ends, or after this number of seconds. */
  private async poll(seconds: number, deadline: RetryDeadline): Promise<void> {
    const request = { name: this.name, timeout: durationFromMs(Math.ceil(seconds * 1000)) };
    try {
      this.message = await this.connections.find((to) =>
        to.call((options) => to.operations.waitOperation(request, options), seconds),
      );
      deadline.extend();
    } catch (error) {
      if (!(error instanceof LmkvError)) throw error;
      if (error.reason === "OPERATION_NOT_FOUND" && this.repeat && performance.now() < this.repeatUntil) {
        await this.continue(this.repeat, deadline);
      } else if (error.reason === "UNREACHABLE") {
        await deadline.waitToRetry(error);
      } else {
        throw error;
      }
    }
  }

  /**
   * Repeats the request, for the coordinator that ran the operation is gone. One that has just started may not know all
   * instances and their chunks: it is asked again for a while.
   */
  private async continue(repeat: () => Promise<OperationMessage>, deadline: RetryDeadline): Promise<void> {
    try {
      this.message = await repeat();
      deadline.extend();
    } catch (error) {
      if (!(error instanceof LmkvError && (error.reason === "UNREACHABLE" || error.code === "NOT_FOUND"))) throw error;
      await deadline.waitToRetry(error);
    }
  }
}

/** A move or a copy. */
export type MoveOperation = Operation<MoveProgress, MoveResult>;
export type ClearOperation = Operation<ClearProgress, ClearResult>;
export type DrainOperation = Operation<DrainProgress, DrainResult>;

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
