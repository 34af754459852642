// Moves, copies, clears and drains: progress, result, and a button to cancel.

import { RPC, call, serverNow } from "./api.js";
import { announce, byId, h, keyed, setAttribute, setProperty, setText, show, whenClicked } from "./dom.js";
import { ago, bytes, count, counted, duration } from "./format.js";

const WORDS = { running: "running", done: "done", partly: "done in part", failed: "failed", cancelled: "cancelled", lost: "lost" };
const known = new Map();

/** Updates the list, and announces ended operations. */
export function showOperations(fleet) {
  const operations = fleet.operations;
  keyed(byId("operations"), operations, (operation) => operation.name, () => makeRow(fleet));
  show(byId("operations-empty"), operations.length === 0);
  setText(byId("operations-count"), operations.length ? `the newest ${count(operations.length)}` : "");
  for (const operation of operations) {
    const { name, state } = operation;
    if (known.get(name) === "running" && state !== "running") announce(`A ${kindOf(operation)} is ${WORDS[state]}`);
  }
  known.clear();
  for (const { name, state } of operations) known.set(name, state);
}

/** Source and destination of an operation, `lmkv-1/host → lmkv-2/host`, or the instance that is cleared or drained. */
export function route({ source, destination, where }) {
  if (where) return `${where.instanceId || "every instance"}${where.tier ? ` / ${where.tier}` : ""}`;
  return source && destination ? `${place(source)} → ${place(destination)}` : "of an earlier coordinator";
}

const kindOf = ({ kind, dryRun }) => (dryRun ? `dry run of a ${kind}` : kind);
const place = (position) => `${position.instanceId} / ${position.tier}`;

function makeRow(fleet) {
  const kind = h("span", { class: "kind" });
  const title = h("h3");
  const state = h("span", { class: "badge" });
  const bar = h("span", { class: "bar", role: "progressbar", "aria-valuemin": 0 });
  const facts = h("p", { class: "muted number" });
  const cancel = h("button", { type: "button", class: "small" }, "Cancel");
  const problem = h("p", { class: "error" });
  const failures = h("ul", { class: "plain" });
  const details = h("details", {}, h("summary", {}, "What was left undone"), failures);
  const element = h(
    "li",
    { class: "operation" },
    h("div", { class: "line" }, kind, title, state, cancel),
    bar,
    facts,
    problem,
    details,
  );
  let name = "";
  let refusal = "";
  whenClicked(cancel, async () => {
    try {
      await call(RPC.cancel, { name });
      refusal = "";
    } catch (error) {
      refusal = `Could not be cancelled: ${error.message}`;
    }
    await fleet.refresh();
  });

  function update(operation) {
    name = operation.name;
    setText(kind, operation.kind);
    setText(title, operation.dryRun ? `${route(operation)} (dry run)` : route(operation));
    setAttribute(title, "title", operation.name);
    setText(state, WORDS[operation.state]);
    setAttribute(state, "data-state", operation.state);
    setAttribute(bar, "aria-label", `${kindOf(operation)} ${route(operation)}`);
    setAttribute(bar, "aria-valuemax", operation.total);
    setAttribute(bar, "aria-valuenow", operation.reached);
    setProperty(bar, "--fill", `${operation.total ? (100 * operation.reached) / operation.total : 0}%`);
    setAttribute(bar, "data-tier", operation.destination ? operation.destination.tier : null);
    show(bar, !operation.done);
    setText(facts, factsOf(operation));
    setAttribute(cancel, "aria-label", `Cancel the ${kindOf(operation)} ${route(operation)}`);
    show(cancel, !operation.done);
    const message = operation.done ? operation.error : refusal;
    setText(problem, message);
    show(problem, message !== "");
    keyed(failures, operation.failures.map((text, index) => ({ text, index })), ({ index }) => index, makeLine);
    show(details, operation.failures.length > 0);
  }

  return { element, update };
}

function makeLine() {
  const element = h("li");
  return { element, update: ({ text }) => setText(element, text) };
}

function factsOf(operation) {
  const now = serverNow();
  const facts = [];
  if (!operation.done) {
    facts.push(`${count(operation.reached)} of ${counted(operation.total, operation.unit)}`);
  } else if (operation.state !== "failed") {
    facts.push(counted(operation.chunkCount, "chunk"));
    if (operation.tokenCount) facts.push(counted(operation.tokenCount, "token"));
  }
  if (operation.bytes) facts.push(bytes(operation.bytes));
  if (operation.createTime) {
    facts.push(`${operation.done ? "took" : "for"} ${duration((operation.endTime ?? now) - operation.createTime)}`);
    if (operation.done) facts.push(`began ${ago(now - operation.createTime)}`);
  }
  return facts.join(" · ");
}
