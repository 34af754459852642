// A cache of the coordinator's operations: those that ended never change and are read once.

import { RPC, call, seconds } from "./api.js";

const PAGE_SIZE = 20;
const MAX_KEPT = 200;
const READ_ALL_EVERY = 60;
const CANCELLED = 1; // of gRPC's codes

/** The newest operations, newest first. */
export class Ledger {
  #known = new Map();
  #syncs = 0;

  get operations() {
    return [...this.#known.values()];
  }

  /**
   * Reads pages until all new and all running operations are read. From time to time, and if `isFull`, it reads all of
   * them, and so drops those that the coordinator forgot.
   */
  async sync(isFull) {
    this.#syncs += 1;
    const before = isFull || this.#syncs % READ_ALL_EVERY === 0 ? new Map() : this.#known;
    const running = new Set([...before.values()].filter((operation) => !operation.done).map(({ name }) => name));
    const seen = new Map();
    let pageToken = "";
    do {
      const page = await call(RPC.operations, { pageSize: PAGE_SIZE, pageToken });
      let isAllNew = true;
      for (const message of page.operations ?? []) {
        const known = before.get(message.name);
        isAllNew &&= !known;
        running.delete(message.name);
        seen.set(message.name, known?.done ? known : readOperation(message));
      }
      pageToken = isAllNew || running.size ? (page.nextPageToken ?? "") : "";
    } while (pageToken && seen.size < MAX_KEPT);
    for (const [name, operation] of before) {
      if (seen.size < MAX_KEPT && !running.has(name) && !seen.has(name)) seen.set(name, operation);
    }
    this.#known = seen;
  }
}

/** The state of an operation that ended with an error; one that is lost ended with its coordinator. */
function readError({ code, details = [] }) {
  if (code === CANCELLED) return "cancelled";
  return details.some(({ reason }) => reason === "OPERATION_NOT_FOUND") ? "lost" : "failed";
}

/** An operation in the page's format. */
function readOperation({ name, done = false, metadata = {}, response, error }) {
  const kind = name.split("-")[0];
  const result = response ?? {};
  const isMove = kind === "move" || kind === "copy";
  const isClear = kind === "clear";
  return {
    name,
    kind,
    done,
    state: !done ? "running" : error ? readError(error) : result.failures ? "partly" : "done",
    error: error?.message ?? "",
    source: isMove ? metadata.oldPosition : null,
    destination: isMove ? metadata.newPosition : null,
    where: isMove ? null : { instanceId: metadata.instanceId ?? "", tier: metadata.tier },
    dryRun: metadata.dryRun ?? false,
    unit: isClear ? "instance" : "chunk",
    total: Number((isClear ? metadata.instanceCount : metadata.chunkCount) ?? 0),
    reached: Number((isClear ? metadata.doneInstanceCount : metadata.doneChunkCount) ?? 0),
    chunkCount: Number(result.chunkCount ?? metadata.doneChunkCount ?? 0),
    tokenCount: Number((response ?? metadata).tokenCount ?? 0),
    bytes: Number(result.transferredBytes ?? metadata.transferredBytes ?? 0),
    failures: readFailures(result.failures ?? []),
    createTime: seconds(metadata.createTime),
    endTime: seconds(metadata.endTime),
  };
}

/** The failures, as lines of text. */
function readFailures(failures) {
  return failures.flatMap((failure) => {
    const parts = failure.failures ?? [failure];
    const who = failure.instanceId ? `${failure.instanceId}: ` : "";
    return parts.map(({ chunkKeys, chunkCount, status }) => {
      const keys = chunkKeys?.length ?? Number(chunkCount ?? 0);
      const chunks = keys ? `${keys} chunk${keys === 1 ? "" : "s"}: ` : "";
      return `${who}${chunks}${status?.message || "no reason was given"}`;
    });
  });
}
