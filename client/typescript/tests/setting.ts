/** What the caller of these tests has set up: a coordinator, by its address, and what its fleet holds. */

import { LmkvError } from "../src/index.js";

/** Of the environment variable `SETTING`, JSON. */
export interface Setting {
  address: string;
  /** Another coordinator of the same fleet. */
  otherAddress: string;
  /** A prompt, and the keys of its chunks, which only the first of two instances holds. */
  tokens: number[];
  keys: Uint8Array[];
  instances: [string, string];
  /** Files of certificates; a stranger's in `otherCa`. */
  tls: { ca: string; cert: string; key: string; otherCa: string };
}

const values = JSON.parse(process.env.SETTING ?? "{}") as Omit<Setting, "keys"> & { keys?: string[] };

export const setting: Setting = {
  ...values,
  keys: (values.keys ?? []).map((key) => Uint8Array.from(Buffer.from(key, "hex"))),
};

/** For `assert.rejects`: whether what was thrown is lmkv's error of this reason, with these words in its metadata. */
export function refusal(reason: string, metadata: Record<string, string> = {}): (error: unknown) => boolean {
  return (error) => {
    if (!(error instanceof LmkvError)) return false;
    const words = Object.entries(metadata).every(([name, value]) => error.metadata[name] === value);
    return error.reason === reason && words;
  };
}

/** Keys as text, which can be compared. */
export function hexKeys(keys: Uint8Array[]): string[] {
  return keys.map((key) => Buffer.from(key).toString("hex"));
}

/** Asks the caller of these tests for something, such as to restart the coordinator. */
export function ask(what: string): void {
  console.log(`ask: ${what}`);
}
