/** Where something is, in people's words: `lmkv-1`, `lmkv-1/disk`. */

import { create } from "@bufbuild/protobuf";

import { LmkvError } from "./errors.js";
import { type Position, PositionSchema, Tier } from "./gen/lmkv/v1/chunk_pb.js";

/** The tiers by their names. */
const TIERS: Readonly<Record<string, Tier>> = {
  gpu: Tier.GPU,
  host: Tier.HOST,
  disk: Tier.DISK,
  remote: Tier.REMOTE,
};

/** The position that `INSTANCE` or `INSTANCE/TIER` names; without a tier it is host memory. Throws `BAD_REQUEST`. */
export function parsePosition(position: string | Position): Position {
  if (typeof position !== "string") return position;
  const slash = position.indexOf("/");
  const instanceId = slash < 0 ? position : position.slice(0, slash);
  const word = slash < 0 ? "host" : position.slice(slash + 1);
  if (!instanceId || !word) {
    throw badRequest(`'${position}' is no position; write INSTANCE or INSTANCE/TIER`, { position });
  }
  const tier = Object.hasOwn(TIERS, word.toLowerCase()) ? TIERS[word.toLowerCase()] : undefined;
  if (tier === undefined) {
    throw badRequest(`'${word}' is no tier; use gpu, host, disk, remote`, { tier: word });
  }
  return create(PositionSchema, { instanceId, tier });
}

function badRequest(message: string, metadata: Record<string, string>): LmkvError {
  return new LmkvError(message, "INVALID_ARGUMENT", "BAD_REQUEST", metadata);
}
