/** The SDK towards a coordinator that wants to know who calls. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Coordinator, type Token } from "../src/index.js";
import { refusal, setting } from "./setting.js";

function caller(token?: Token): Coordinator {
  return new Coordinator(setting.address, token === undefined ? {} : { token });
}

test("who shows a token is known, also in streams", async () => {
  using reader = caller("reader-token");
  assert.deepEqual(await reader.instances(), []);
  for await (const update of reader.watch()) {
    assert.ok(update.reset);
    break;
  }
});

test("a missing or unknown token is rejected", async () => {
  for (const token of [undefined, "another"]) {
    using stranger = caller(token);
    await assert.rejects(stranger.instances(), refusal("UNAUTHENTICATED"));
    await assert.rejects(stranger.watch().next(), refusal("UNAUTHENTICATED"));
    await assert.rejects(stranger.lookupStream().lookup({}), refusal("UNAUTHENTICATED"));
  }
});

test("a read-only token gets an explanation", async () => {
  using reader = caller("reader-token");
  await assert.rejects(reader.clear({ everything: true }), { code: "PERMISSION_DENIED", reason: "PERMISSION_DENIED" });
});

test("a token is asked for at each call", async () => {
  let token = "another";
  using reader = caller(() => token);
  await assert.rejects(reader.instances(), refusal("UNAUTHENTICATED"));
  token = "reader-token";
  assert.deepEqual(await reader.instances(), []);
});
