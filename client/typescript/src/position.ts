/** Where something is, in people's words: `lmkv-1`, `lmkv-1/disk`. */

import { create } from "@bufbuild/protobuf";

import { LmkvError } from "./errors.js";
import { type Position, PositionSchema } from "./gen/lmkv/v1/chunk_pb.js";

/** The position that `INSTANCE` or `INSTANCE/TIER` names; without a tier it is host memory. Throws `BAD_REQUEST`. */
export function parsePosition(position: string | Position): Position {
  if (typeof position !== "string") return position;
  const slash = position.indexOf("/");
  const instanceId = slash < 0 ? position : position.slice(0, slash);
  const tier = slash < 0 ? "host" : position.slice(slash + 1);
  if (!instanceId || !tier) {
    const message = `'${position}' is no position; write INSTANCE or INSTANCE/TIER`;
    throw new LmkvError(message, "INVALID_ARGUMENT", "BAD_REQUEST", { position });
  }
  return create(PositionSchema, { instanceId, tier });
}
