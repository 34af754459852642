/** How callers name chunks: by a prompt's tokens or by keys, the same in every request. */

import { create } from "@bufbuild/protobuf";

import { MAX_MESSAGE_BYTES } from "./connection.js";
import { LmkvError } from "./errors.js";
import { type PromptSelector, PromptSelectorSchema } from "./gen/lmkv/v1/prompt_pb.js";

/** Most that a request's chunks may take of a message, which holds a little besides. */
const MAX_CHUNKS_BYTES = MAX_MESSAGE_BYTES - 512;
/** Bytes of a token id in a message: they are of fixed width. */
const TOKEN_BYTES = 4;

/** What names chunks. */
export interface Chunks {
  /** Token ids of a prompt, in order. */
  tokens?: Iterable<number>;
  /** Keys of the chunks in prompt order, 16 bytes each, instead of tokens. */
  keys?: Iterable<Uint8Array>;
  /** Model whose tokens these are, or a LoRA adapter of it, as served; needed only if the fleet serves several. */
  modelName?: string;
  /** Cache salt that the prompt was sent with. */
  cacheSalt?: string;
  /** LoRA adapter that the prompt was sent with: its served name, or its identity `name@digest`. */
  loraName?: string;
  /** Fingerprint of the keys' spec; by default that under which the first key that is held was reported. */
  fingerprint?: Uint8Array;
}

/**
 * The field `prompt` of a request about these chunks. Throws `BAD_TOKENS` if the tokens are none, or are named with keys.
 *
 * Throws `BAD_TOKENS`, `BAD_CHUNK_KEY` or `BAD_REQUEST`, by the field that takes most, if they are too long to be sent:
 * gRPC would end the call, and with it a stream that others ask on, too.
 */
export function promptFields(chunks: Chunks): { prompt?: PromptSelector } {
  const tokenIds = Array.from(chunks.tokens ?? []);
  const chunkKeys = Array.from(chunks.keys ?? [], (key) => new Uint8Array(key));
  const wrong = tokenIds.find((token) => (token | 0) !== token);
  if (wrong !== undefined) {
    const message = `tokens must be integers from 0 to 2^31-1, not ${wrong}`;
    throw new LmkvError(message, "INVALID_ARGUMENT", "BAD_TOKENS", { token: String(wrong) });
  }
  if (tokenIds.length && chunkKeys.length) {
    const message = "chunks are named by tokens and by keys; use one of the two";
    throw new LmkvError(message, "INVALID_ARGUMENT", "BAD_TOKENS", {});
  }
  const { modelName = "", cacheSalt = "", loraName = "", fingerprint = new Uint8Array() } = chunks;
  refuseTooLong([
    ["tokens", TOKEN_BYTES * tokenIds.length],
    ["chunk_keys", chunkKeys.reduce((sum, key) => sum + key.length + 2, 0)],
    ["model_name", Buffer.byteLength(modelName)],
    ["cache_salt", Buffer.byteLength(cacheSalt)],
    ["lora_name", Buffer.byteLength(loraName)],
  ]);
  if (chunkKeys.length) {
    const ofTokens = Object.entries({ modelName, cacheSalt, loraName }).find(([, value]) => value);
    if (ofTokens) {
      const message = `${ofTokens[0]}: keys contain it; leave it out`;
      throw new LmkvError(message, "INVALID_ARGUMENT", "BAD_REQUEST", { field: ofTokens[0] });
    }
    const value = { chunkKeys, fingerprint: new Uint8Array(fingerprint) };
    return { prompt: create(PromptSelectorSchema, { prompt: { case: "keys", value } }) };
  }
  if (!(tokenIds.length || modelName || cacheSalt || loraName)) return {};
  const value = { tokenIds, modelName, cacheSalt, loraName };
  return { prompt: create(PromptSelectorSchema, { prompt: { case: "tokens", value } }) };
}

/** Throws if these fields, by their names and sizes, are too long together. */
function refuseTooLong(sizes: [string, number][]): void {
  if (sizes.reduce((sum, [, bytes]) => sum + bytes, 0) <= MAX_CHUNKS_BYTES) return;
  const [field, bytes] = sizes.reduce((longest, one) => (one[1] > longest[1] ? one : longest));
  const reason = { tokens: "BAD_TOKENS", chunk_keys: "BAD_CHUNK_KEY" }[field] ?? "BAD_REQUEST";
  const message = `${field} has ${bytes} bytes; the limit of a request is ${MAX_CHUNKS_BYTES}: use a prefix`;
  const metadata = { field, size_bytes: String(bytes), limit_bytes: String(MAX_CHUNKS_BYTES) };
  throw new LmkvError(message, "INVALID_ARGUMENT", reason, metadata);
}
