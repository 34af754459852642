/** The SDK with a coordinator and two nodes that move bytes, as people run them. */

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { after, test } from "node:test";

import { LookupResponseSchema } from "lmkv-client/v1/cache_service";

import { Coordinator, type LayoutUpdate } from "../src/index.js";
import { ask, refusal, setting, hexKeys } from "./setting.js";

const { tokens, keys } = setting;
const [source, destination] = setting.instances;
const coordinator = new Coordinator(setting.address);
after(() => {
  coordinator.close();
});

async function holders(): Promise<Record<string, number>> {
  const answer = await coordinator.lookup({ tokens });
  return Object.fromEntries(answer.holders.map((holder) => [holder.instanceId, holder.matchedChunkCount]));
}

/** The chunks of instances, by the updates of a watcher. */
class LayoutMap {
  readonly held = new Map<string, Set<string>>();

  apply(update: LayoutUpdate): void {
    if (update.reset) this.held.clear();
    for (const change of update.changes) {
      const held = this.held.get(change.instanceId) ?? new Set();
      this.held.set(change.instanceId, held);
      if (change.instanceGone) held.clear();
      for (const key of hexKeys(change.admittedKeys)) held.add(key);
      for (const key of hexKeys(change.evictedKeys)) held.delete(key);
    }
  }

  count(name: string): number {
    return this.held.get(name)?.size ?? 0;
  }
}

test("a prompt is looked up by tokens or by keys", async () => {
  const byTokens = await coordinator.lookup({ tokens, modelName: "small" });
  const byKeys = await coordinator.lookup({ keys });
  assert.equal(byTokens.$typeName, LookupResponseSchema.typeName);
  assert.deepEqual(byKeys.holders, byTokens.holders);
  const [holder] = byTokens.holders;
  assert.equal(holder?.instanceId, source);
  assert.equal(holder.matchedTokenCount, tokens.length);
  assert.equal(holder.runs[0]?.tier, "host");
  assert.deepEqual((await coordinator.lookup({ tokens, cacheSalt: "another" })).holders, []);
});

test("instances are listed", async () => {
  const instances = await coordinator.instances();
  assert.deepEqual(
    instances.map((instance) => [instance.instanceId, instance.specs[0]?.modelName]),
    [
      [source, "small"],
      [destination, "small"],
    ],
  );
});

test("refusals have their reason, their code and the words of their message", async () => {
  const nowhere = coordinator.move({ tokens, source, destination: "nowhere" });
  await assert.rejects(nowhere, refusal("INSTANCE_NOT_FOUND", { instance_id: "nowhere" }));
  await assert.rejects(nowhere, { name: "LmkvError", code: "NOT_FOUND", message: /nowhere/ });
  await assert.rejects(coordinator.lookup({ tokens: [5000] }), refusal("BAD_TOKENS"));
  await assert.rejects(coordinator.lookup({ tokens: [-1] }), refusal("BAD_TOKENS", { token: "-1" }));
  await assert.rejects(coordinator.lookup({ tokens: [2 ** 31] }), refusal("BAD_TOKENS", { token: "2147483648" }));
  await assert.rejects(coordinator.lookup({ tokens: [0.5] }), refusal("BAD_TOKENS"));
  await assert.rejects(coordinator.lookup({ keys: [Uint8Array.of(1)] }), refusal("BAD_CHUNK_KEY"));
  await assert.rejects(coordinator.lookup({ tokens, modelName: "large" }), refusal("MODEL_NOT_FOUND"));
  await assert.rejects(coordinator.move({ source, destination }), refusal("BAD_SELECTION"));
  await assert.rejects(coordinator.operation("move-nowhere"), refusal("OPERATION_NOT_FOUND"));
  for (const position of ["", `${source}/`, "/host"]) {
    await assert.rejects(coordinator.move({ tokens, source: position, destination }), refusal("BAD_REQUEST"));
  }
  for (const position of [`${source}/attic`, `${source}/HOST`]) {
    await assert.rejects(coordinator.move({ tokens, source: position, destination }), refusal("BAD_SELECTION"));
  }
});

test("a question that is longer than a message may be is refused alone", async () => {
  using stream = coordinator.lookupStream();
  const limit = { limit_bytes: String((1 << 20) - 512) };
  const asked = stream.lookup({ keys });
  const long = { tokens: new Int32Array(1 << 20).fill(999) };
  const manyKeys = { keys: [new Uint8Array(1 << 20)] };
  for (const asks of [stream, coordinator]) {
    await assert.rejects(
      asks.lookup(long),
      refusal("BAD_TOKENS", { field: "tokens", size_bytes: "4194304", ...limit }),
    );
    await assert.rejects(
      asks.lookup(manyKeys),
      refusal("BAD_CHUNK_KEY", { field: "chunk_keys", size_bytes: "1048578", ...limit }),
    );
    await assert.rejects(asks.lookup({ keys, cacheSalt: "x".repeat(1 << 20) }), refusal("BAD_REQUEST"));
  }
  assert.equal((await asked).holders.length, 1);
  const longest = new Int32Array(((1 << 20) - 512) / 4).fill(999);
  assert.deepEqual((await stream.lookup({ tokens: longest })).holders, []);
});

test("a stream of lookups answers each its own", async () => {
  using stream = coordinator.lookupStream();
  const lengths = Array.from({ length: 300 }, (_, index) => 32 * (1 + (index % 5))); // more than may be in flight
  const answers = await Promise.all(lengths.map((length) => stream.lookup({ tokens: tokens.slice(0, length) })));
  assert.deepEqual(
    answers.map((answer) => answer.holders[0]?.matchedTokenCount),
    lengths,
  );
  await assert.rejects(stream.lookup({ tokens: [5000] }), refusal("BAD_TOKENS"));
  assert.equal((await stream.lookup({ keys })).holders[0]?.matchedChunkCount, keys.length);
  stream.close();
  assert.equal((await stream.lookup({ keys })).holders.length, 1); // it opens again
});

test("lookups that are too long together do not share a message", async () => {
  using stream = coordinator.lookupStream();
  const long = new Int32Array(150_000).fill(999); // 600 kB, two of which are more than a message may have
  const answers = await Promise.all([long, long, long, long].map((tokens) => stream.lookup({ tokens })));
  assert.deepEqual(
    answers.map((answer) => answer.holders),
    [[], [], [], []],
  );
});

test("a copy arrives, and leaves the source as it was", async () => {
  const copy = await coordinator.copy({
    keys: keys.slice(0, 1),
    source,
    destination: `${destination}/host`,
  });
  assert.equal(copy.kind, "copy");
  const result = await copy.wait(20);
  assert.deepEqual([result.chunkCount, result.droppedChunkCount, result.failures.length], [1, 0, 0]);
  assert.deepEqual(await holders(), { [source]: keys.length, [destination]: 1 });
});

test("a watcher sees what is held, then the move that it waits for, and comes back to what it missed", async () => {
  const map = new LayoutMap();
  let revision: bigint | undefined;
  for await (const update of coordinator.watch()) {
    map.apply(update);
    if (revision === undefined && !update.snapshot) {
      revision = update.revision;
      assert.deepEqual([map.count(source), map.count(destination)], [keys.length, 1]);
      const move = await coordinator.move({ tokens, source, destination });
      assert.equal(move.progress.chunkCount, keys.length);
      const result = await move.wait(20);
      assert.deepEqual([result.chunkCount, result.droppedChunkCount], [keys.length, keys.length]);
      assert.deepEqual([move.done, move.state, move.error, move.result], [true, "done", undefined, result]);
    }
    if (map.count(source) === 0 && map.count(destination) === keys.length) break;
  }
  assert.deepEqual(await holders(), { [destination]: keys.length });

  const again = new LayoutMap();
  for await (const update of coordinator.watch({ startRevision: revision ?? 0n })) {
    assert.deepEqual([update.reset, update.snapshot], [false, false]);
    again.apply(update);
    if (again.count(destination) === keys.length - 1) break; // all but the one that it held before
  }
});

test("a watcher restarts if its revision is unknown", async () => {
  for await (const update of coordinator.watch({ startRevision: 7n })) {
    assert.deepEqual([update.reset, update.snapshot], [true, true]);
    break;
  }
});

test("a watch ends by its signal", async () => {
  const ending = new AbortController();
  let count = 0;
  for await (const update of coordinator.watch({ signal: ending.signal })) {
    count++;
    if (!update.snapshot) ending.abort();
  }
  assert.ok(count > 0);
});

test("an order repeated by its request id is carried out once", async () => {
  const order = { tokens, source: destination, destination: source, requestId: randomUUID() };
  const [first, second] = [await coordinator.copy(order), await coordinator.copy(order)];
  assert.equal(first.name, second.name);
  await first.wait(20);
  const names = (await coordinator.operations()).map((operation) => operation.name);
  assert.equal(names[0], first.name);
  const found = await coordinator.operation(first.name);
  assert.deepEqual([found.state, found.result], ["done", first.result]);
});

test("what is pinned stays; the rest is cleared after it was said what would be", async () => {
  const pin = await coordinator.pin({ keys: keys.slice(0, 1), position: source, ttlSeconds: 60.5 });
  assert.equal(pin.chunkCount, 1);
  assert.deepEqual(
    (await coordinator.pins()).map((one) => one.pinId),
    [pin.pinId],
  );
  const would = await (await coordinator.clear({ keys, instanceId: source, dryRun: true })).wait(20);
  assert.equal((await holders())[source], keys.length);
  const done = await (await coordinator.clear({ keys, instanceId: source, tier: "host" })).wait(20);
  assert.deepEqual([would.chunkCount, done.chunkCount], [keys.length - 1, keys.length - 1]);
  assert.equal((await holders())[source], 1);
  await coordinator.unpin(pin.pinId);
  await coordinator.unpin(pin.pinId); // idempotent
  assert.deepEqual(await coordinator.pins(), []);
  const rest = await coordinator.clear({ instanceId: source, everything: true });
  assert.equal((await rest.wait(20)).chunkCount, 1);
});

test("a watch and a stream of lookups outlast a coordinator that is killed", async () => {
  using stream = coordinator.lookupStream();
  await stream.lookup({ tokens });
  const map = new LayoutMap();
  let isAsked = false;
  for await (const update of coordinator.watch()) {
    map.apply(update);
    if (isAsked && map.count(destination) === keys.length) break; // the nodes have reported to the new one
    if (!isAsked && !update.snapshot) {
      ask("kill");
      isAsked = true;
      map.held.clear();
    }
  }
  assert.equal((await stream.lookup({ tokens })).holders[0]?.instanceId, destination);
});

test("what is closed says so", async () => {
  const closed = new Coordinator(setting.address);
  const watching = closed.watch();
  await watching.next();
  closed.close();
  closed.close(); // closing twice is fine
  await assert.rejects(async () => {
    for await (const update of watching) assert.ok(update);
  }, refusal("CLOSED"));
  await assert.rejects(closed.instances(), refusal("CLOSED"));
  await assert.rejects(closed.lookupStream().lookup({ keys }), refusal("CLOSED"));
});

test("without a coordinator, calls and watches are unreachable", async () => {
  using missing = new Coordinator("127.0.0.1:1");
  await assert.rejects(missing.instances(), refusal("UNREACHABLE", { address: "127.0.0.1:1" }));
  await assert.rejects(missing.lookupStream().lookup({ keys }), refusal("UNREACHABLE"));
  await assert.rejects(missing.watch({ retrySeconds: 0 }).next(), refusal("UNREACHABLE"));
});
