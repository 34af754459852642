/** The SDK with a coordinator that requires mutual TLS. */

import assert from "node:assert/strict";
import { copyFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { Coordinator, type Tls } from "../src/index.js";
import { refusal, setting } from "./setting.js";

const { ca, cert, key, otherCa } = setting.tls;

async function instances(tls?: Tls): Promise<unknown[]> {
  using coordinator = new Coordinator(setting.address, tls && { tls });
  return await coordinator.instances();
}

test("a client with a certificate is accepted", async () => {
  assert.deepEqual(await instances({ ca, cert, key }), []);
});

test("who shows none is not", async () => {
  await assert.rejects(instances({ ca }), refusal("UNREACHABLE"));
});

test("a coordinator of another issuer is not spoken to", async () => {
  await assert.rejects(instances({ ca: otherCa, cert, key }), refusal("UNREACHABLE"));
});

test("without TLS the coordinator is unreachable", async () => {
  await assert.rejects(instances(), refusal("UNREACHABLE"));
});

test("files that are missing are named", async () => {
  await assert.rejects(instances({ ca: "/nowhere.pem" }), {
    reason: "CONFIG_ERROR",
    message: /^tls\.ca: cannot read \/nowhere\.pem/,
  });
  await assert.rejects(instances({ ca, cert }), { reason: "CONFIG_ERROR", message: /^tls\.key is missing/ });
});

test("files that make no pair are refused", async () => {
  await assert.rejects(instances({ ca, cert, key: ca }), {
    reason: "CONFIG_ERROR",
    message: /not the key of tls\.cert/,
  });
});

test("files that are replaced count from the next connection on, unless they make no sense", async () => {
  const folder = mkdtempSync(join(tmpdir(), "lmkv-"));
  const files = { ca: join(folder, "ca.pem"), cert: join(folder, "cert.pem"), key: join(folder, "key.pem") };
  try {
    copyFileSync(otherCa, files.ca);
    copyFileSync(cert, files.cert);
    copyFileSync(key, files.key);
    using coordinator = new Coordinator(setting.address, { tls: files });
    await assert.rejects(coordinator.instances(), refusal("UNREACHABLE"));
    writeFileSync(files.cert, "half of one");
    copyFileSync(ca, files.ca);
    await assert.rejects(coordinator.instances(), refusal("UNREACHABLE")); // as before
    copyFileSync(cert, files.cert);
    assert.deepEqual(await coordinator.instances(), []);
  } finally {
    rmSync(folder, { recursive: true });
  }
});
