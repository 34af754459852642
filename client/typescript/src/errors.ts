/** How lmkv refuses: one class, whose `reason` says what it is. Statuses of calls and in answers become it. */

import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { ConnectError } from "@connectrpc/connect";

import { type ErrorInfo, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";

const DOMAIN = "lmkv.v1";

const CODES = [
  "OK",
  "CANCELLED",
  "UNKNOWN",
  "INVALID_ARGUMENT",
  "DEADLINE_EXCEEDED",
  "NOT_FOUND",
  "ALREADY_EXISTS",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "FAILED_PRECONDITION",
  "ABORTED",
  "OUT_OF_RANGE",
  "UNIMPLEMENTED",
  "INTERNAL",
  "UNAVAILABLE",
  "DATA_LOSS",
  "UNAUTHENTICATED",
] as const;

/** Name of a gRPC status code. */
export type Code = (typeof CODES)[number];

/** Everything lmkv refuses. */
export class LmkvError extends Error {
  override readonly name = "LmkvError";
  /** Name of the gRPC status code: `NOT_FOUND`, ... */
  readonly code: Code;
  /**
   * What it is about, such as `INSTANCE_NOT_FOUND`; `lmkv/errors.py` lists them. `UNREACHABLE` also stands for a
   * coordinator that does not answer, `CLOSED` for a call by what was closed, `INTERNAL` for what has no reason.
   */
  readonly reason: string;
  /** The dynamic words of the message: `instance_id`, ... */
  readonly metadata: Readonly<Record<string, string>>;

  constructor(message: string, code: Code, reason: string, metadata: Readonly<Record<string, string>> = {}) {
    super(message);
    this.code = code;
    this.reason = reason;
    this.metadata = metadata;
  }
}

/** The error in a status that an answer carries. */
export function fromStatus(status: Status): LmkvError {
  const details = status.details.map((detail) => anyUnpack(detail, ErrorInfoSchema));
  return withReason(status.message, status.code, details);
}

/** What a failed call means, where the other side said why; else undefined. */
export function fromDetails(error: ConnectError): LmkvError | undefined {
  const details = error.findDetails(ErrorInfoSchema).filter((info) => info.domain === DOMAIN);
  return details.length ? withReason(error.rawMessage, error.code, details) : undefined;
}

/** The name of a status code by its number. */
export function codeName(code: number): Code {
  return CODES[code] ?? "UNKNOWN";
}

function withReason(message: string, code: number, details: (ErrorInfo | undefined)[]): LmkvError {
  const info = details.find((detail) => detail?.domain === DOMAIN);
  return new LmkvError(message, codeName(code), info?.reason ?? "INTERNAL", info?.metadata);
}
