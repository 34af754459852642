/** The SDK while instances hold back what they are ordered to do. */

import assert from "node:assert/strict";
import { after, test } from "node:test";

import { Coordinator, type MoveOperation } from "../src/index.js";
import { ask, refusal, setting } from "./setting.js";

const { tokens } = setting;
const [source, destination] = setting.instances;
const coordinator = new Coordinator(setting.address);
after(() => {
  coordinator.close();
});

async function startPaused(): Promise<MoveOperation> {
  return await coordinator.move({ tokens, source, destination });
}

test("waiting too long leaves the operation running, and a cancelled one throws that it was", async () => {
  const move = await startPaused();
  await assert.rejects(move.wait(0.05), {
    name: "TimeoutError",
    message: `${move.name} is still running after 0.05 s`,
  });
  assert.deepEqual([move.done, move.state, move.result, move.error], [false, "running", undefined, undefined]);
  const running = await coordinator.operations({ running: true });
  assert.deepEqual(
    running.map((operation) => operation.name),
    [move.name],
  );
  await move.cancel();
  await assert.rejects(move.wait(20), refusal("OPERATION_CANCELLED"));
  assert.equal(move.state, "cancelled");
});

test("iteration yields progress until the end", async () => {
  const copy = await coordinator.copy({ tokens, source, destination });
  const done = [];
  for await (const progress of copy) {
    if (!done.length) ask("resume");
    done.push(progress.doneChunkCount);
  }
  assert.deepEqual([done[0], done.at(-1)], [0, setting.keys.length]);
  await copy.refresh();
  assert.equal(copy.state, "done");
});

test("waiting outlasts a restart of the coordinator: the request is repeated", async () => {
  ask("pause");
  const move = await startPaused();
  const waiting = move.wait(30);
  ask("restart");
  assert.equal((await waiting).chunkCount, setting.keys.length);
  assert.equal(move.state, "done");
});
