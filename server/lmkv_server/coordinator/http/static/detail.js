// The details of one instance, in a dialog that follows the fleet. The address `#instance=ID` opens it, too.

import { history, seconds, serverNow } from "./api.js";
import { byId, h, keyed, setAttribute, setProperty, setText, show } from "./dom.js";
import { ago, bytes, bytesOf, count, counted, percent } from "./format.js";
import { History } from "./history.js";
import { hitsOf, hitsText, makeHitsBar, stateOf, stateText, usageOf } from "./instances.js";

const ANCHOR = "#instance=";
const MAX_PEERS = 8;
/** Of more instances that an instance cannot share chunks with, some are named. An instance lists 16 at most. */
const MAX_NAMED = 4;
const HISTORY_MS = 10_000;

export class Detail {
  #fleet;
  #instanceId = "";
  #dialog = byId("detail");
  #bar = makeHitsBar();
  #history = null;
  #readAt = -Infinity;

  constructor(fleet) {
    this.#fleet = fleet;
    byId("detail-hits").prepend(this.#bar.element);
    byId("detail-close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("close", () => this.#closed());
    addEventListener("hashchange", () => this.#follow());
    this.#follow();
  }

  /** Opens the dialog. */
  open(instanceId) {
    location.hash = ANCHOR.slice(1) + encodeURIComponent(instanceId);
  }

  /** Updates the dialog, if it is open. */
  show() {
    if (!this.#dialog.open) return;
    const instance = this.#fleet.instances.find(({ instanceId }) => instanceId === this.#instanceId);
    setText(byId("detail-title"), this.#instanceId);
    show(byId("detail-gone"), this.#fleet.isKnown && !instance);
    show(byId("detail-body"), instance !== undefined);
    if (!instance) return;
    setAttribute(byId("detail-state"), "data-state", stateOf(this.#fleet, instance));
    setText(byId("detail-state-text"), stateText(this.#fleet, instance));
    keyed(byId("detail-facts"), factsOf(instance), ([name]) => name, makeFact);
    keyed(byId("detail-models"), instance.specs ?? [], (spec) => spec.fingerprint, makeSpec);
    keyed(byId("detail-tiers"), instance.tiers ?? [], (usage) => usage.tier, makeTier);
    this.#bar.update(instance.stats);
    const { asked } = hitsOf(instance.stats);
    setText(byId("detail-hits-text"), asked ? `${hitsText(instance.stats)}, of ${counted(asked, "chunk")}` : "nothing looked up yet");
    keyed(byId("detail-peers"), this.#peers(), ({ key }) => key, makeLine);
    const conflicts = conflictTexts(instance.conflicts ?? []);
    keyed(byId("detail-conflicts"), conflicts, (text) => text, (text) => ({ element: h("li", {}, text), update() {} }));
    show(byId("detail-conflicts"), conflicts.length > 0);
    this.#readHistory();
  }

  #follow() {
    const isOne = location.hash.startsWith(ANCHOR);
    if (!isOne) return this.#dialog.close();
    this.#instanceId = decodeURIComponent(location.hash.slice(ANCHOR.length));
    this.#readAt = -Infinity;
    this.#history?.remove();
    this.#history = null;
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#dialog.scrollTop = 0;
    this.show();
  }

  #closed() {
    if (location.hash.startsWith(ANCHOR)) window.history.pushState(null, "", location.pathname);
  }

  #peers() {
    const own = this.#fleet.flows.filter(({ from, to }) => [from, to].includes(this.#instanceId) && from !== to);
    const lines = own.slice(0, MAX_PEERS).map((flow) => {
      const isRead = flow.to === this.#instanceId;
      const words = isRead ? `fetched from ${flow.from}` : `fetched by ${flow.to}`;
      return { key: flow.key, text: `${words}: ${counted(flow.chunks, "chunk")}, ${bytes(flow.bytes)}` };
    });
    const more = own.length - lines.length;
    const none = { key: "", text: "It has exchanged nothing with another instance." };
    return lines.length ? [...lines, ...(more ? [{ key: "more", text: `and ${count(more)} more` }] : [])] : [none];
  }

  async #readHistory() {
    const now = performance.now();
    if (now - this.#readAt < HISTORY_MS) return;
    this.#readAt = now;
    const instanceId = this.#instanceId;
    let samples;
    try {
      samples = await history(instanceId);
    } catch {
      return; // the instance has left, or the coordinator does not answer: both are shown elsewhere
    }
    if (instanceId !== this.#instanceId || !this.#dialog.open) return;
    const isShown = samples.times.length > 1;
    show(byId("detail-history"), isShown);
    if (!isShown) return;
    this.#history ??= new History(byId("detail-history"));
    this.#history.show(samples);
  }
}

function factsOf(instance) {
  return [
    ["Address", instance.peerAddress || "none"],
    ["Engines", count(instance.engineCount ?? 0)],
    ["Joined", ago(serverNow() - seconds(instance.registerTime))],
    ["Version", instance.version || "unknown"],
    ["Evicted", counted(Number(instance.stats?.evictedChunks ?? 0), "chunk")],
  ];
}

function makeFact([name]) {
  const value = h("dd");
  return { element: h("div", {}, h("dt", {}, name), value), update: ([, text]) => setText(value, text) };
}

function makeSpec() {
  const element = h("li");
  const update = (spec) => {
    const layerCount = [spec, ...(spec.moreParts ?? [])].reduce((sum, part) => sum + part.layerCount, 0);
    const size = `${spec.chunkSize} tokens a chunk, ${layerCount} layers`;
    setText(element, `${spec.modelName} · ${spec.kvDtype} · ${size}`);
    setAttribute(element, "title", spec.modelId ?? null);
  };
  return { element, update };
}

function makeTier({ tier: name }) {
  const bar = h("span", { class: "bar", "data-tier": name, role: "meter", "aria-label": name });
  const text = h("span", { class: "muted number" });
  const update = (usage) => {
    const { used, capacity, fill, text: room } = usageOf(usage);
    for (const [attribute, value] of [["min", 0], ["max", 100], ["now", Math.round(fill)]]) {
      setAttribute(bar, `aria-value${attribute}`, value);
    }
    setAttribute(bar, "aria-valuetext", `${room}, ${percent(used, capacity)}`);
    setProperty(bar, "--fill", `${fill.toFixed(1)}%`);
    show(bar, capacity > 0);
    const salts = counted(Number(usage.saltCount ?? 0), "salt");
    const most = bytesOf(Number(usage.maxSaltUsedBytes ?? 0), Number(usage.saltQuotaBytes ?? 0));
    const quota = Number(usage.saltQuotaBytes ?? 0) ? ` · ${salts}, the largest has ${most}` : "";
    setText(text, `${room} · ${counted(Number(usage.chunkCount ?? 0), "chunk")}${quota}`);
  };
  return { element: h("li", {}, h("span", { class: "name" }, name), bar, text), update };
}

function makeLine() {
  const element = h("li");
  return { element, update: ({ text }) => setText(element, text) };
}

/** A line for each reason. */
function conflictTexts(conflicts) {
  const reasons = new Map();
  for (const { modelName, instanceId, field, ownValue, otherValue } of conflicts) {
    const reason = JSON.stringify([modelName, field, ownValue, otherValue]);
    reasons.set(reason, [...(reasons.get(reason) ?? []), instanceId]);
  }
  return [...reasons].map(([reason, ids]) => {
    const [modelName, field, ownValue, otherValue] = JSON.parse(reason);
    const isCut = ids.length > MAX_NAMED;
    const named = ids.sort(byName).slice(0, MAX_NAMED).join(", ") + (isCut ? " and others" : "");
    return `Shares no chunks of ${modelName} with ${named}: ${field} is ${ownValue} here, ${otherValue} there`;
  });
}

const byName = new Intl.Collator("en", { numeric: true }).compare;
