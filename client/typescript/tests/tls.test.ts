/** The SDK towards a coordinator that speaks TLS and lets in only whom its issuer knows. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Coordinator, type Tls } from "../src/index.js";
import { refusal, setting } from "./setting.js";

const { ca, cert, key, otherCa } = setting.tls;

async function instances(tls?: Tls): Promise<unknown[]> {
  using coordinator = new Coordinator(setting.address, tls && { tls });
  return await coordinator.instances();
}

test("who shows a certificate is let in", async () => {
  assert.deepEqual(await instances({ ca, cert, key }), []);
});

test("who shows none is not", async () => {
  await assert.rejects(instances({ ca }), refusal("UNREACHABLE"));
});

test("a coordinator of another issuer is not spoken to", async () => {
  await assert.rejects(instances({ ca: otherCa, cert, key }), refusal("UNREACHABLE"));
});

test("without TLS nobody is reached", async () => {
  await assert.rejects(instances(), refusal("UNREACHABLE"));
});

test("files that are missing are named", async () => {
  await assert.rejects(instances({ ca: "/nowhere.pem" }), {
    reason: "CONFIG_ERROR",
    message: /^tls\.ca: cannot read \/nowhere\.pem/,
  });
  await assert.rejects(instances({ ca, cert }), { reason: "CONFIG_ERROR", message: /^tls\.key is missing/ });
});
