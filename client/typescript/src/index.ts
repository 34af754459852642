/**
 * An SDK for lmkv's coordinator.
 *
 *     using coordinator = new Coordinator("head:9000");
 *     const answer = await coordinator.lookup({ tokens });
 */

export type { Chunks } from "./chunks.js";
export {
  type Clear,
  Coordinator,
  type CoordinatorOptions,
  type Drain,
  type Move,
  type Order,
  type Pin,
} from "./coordinator.js";
export type { Token } from "./connection.js";
export { type Code, LmkvError } from "./errors.js";
export type { LookupStream } from "./lookup-stream.js";
export type { ClearOperation, DrainOperation, MoveOperation, Operation, OperationState } from "./operation.js";
export type { Tls } from "./tls.js";
export type { LayoutUpdate, WatchOptions } from "./watch.js";
