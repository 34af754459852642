/** How callers name chunks: by a prompt's tokens or by keys, the same in every request. */

import { LmkvError } from "./errors.js";

/** What names chunks. */
export interface Chunks {
  /** Token ids of a prompt, in order. */
  tokens?: Iterable<number>;
  /** Keys of the chunks in prompt order, 16 bytes each, instead of tokens. */
  keys?: Iterable<Uint8Array>;
  /** Model whose tokens these are; needed only if the fleet serves several. */
  modelName?: string;
  /** Cache salt that the prompt was sent with. */
  cacheSalt?: string;
  /** LoRA adapter that the prompt was sent with. */
  loraName?: string;
}

/** The fields of a request about these chunks. Throws `BAD_TOKENS` if the tokens are none. */
export function chunkFields(chunks: Chunks) {
  const tokens = Array.from(chunks.tokens ?? []);
  const wrong = tokens.find((token) => (token | 0) !== token);
  if (wrong !== undefined) {
    const message = `tokens must be integers from 0 to 2^31-1, not ${wrong}`;
    throw new LmkvError(message, "INVALID_ARGUMENT", "BAD_TOKENS", { token: String(wrong) });
  }
  return {
    tokens,
    chunkKeys: new Uint8Array(Buffer.concat(Array.from(chunks.keys ?? []))),
    modelName: chunks.modelName ?? "",
    cacheSalt: chunks.cacheSalt ?? "",
    loraName: chunks.loraName ?? "",
  };
}
