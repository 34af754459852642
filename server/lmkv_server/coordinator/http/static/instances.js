// The list of instances: models, usage of tiers, hits, and whether they report.

import { byId, h, keyed, setAttribute, setProperty, setText, show } from "./dom.js";
import { ago, bytes, bytesOf, count, counted, duration, percent } from "./format.js";
import { seconds, serverNow } from "./api.js";

const MAX_NAMED = 4;

/** Updates the list. */
export function showInstances(fleet) {
  keyed(byId("instances"), fleet.instances, (instance) => instance.instanceId, () => makeRow(fleet));
  show(byId("instances-empty"), fleet.instances.length === 0);
}

function makeRow(fleet) {
  const name = h("h3");
  const address = h("span", { class: "muted address" });
  const models = h("ul", { class: "chips", "aria-label": "Models" });
  const tiers = h("ul", { class: "tiers", "aria-label": "Tiers" });
  const hits = makeHits();
  const dot = h("span", { class: "dot" });
  const word = h("span");
  const reports = h("p", { class: "reports" }, dot, word);
  const engines = h("p", { class: "muted" });
  const joined = h("p", { class: "muted" });
  const conflicts = h("ul", { class: "conflicts", "aria-label": "Cannot share" });
  const element = h(
    "li",
    { class: "instance" },
    h("div", { class: "who" }, name, address, models),
    h("div", {}, tiers, hits.element),
    h("div", { class: "how" }, reports, engines, joined),
    conflicts,
  );

  function update(instance) {
    setText(name, instance.instanceId);
    setText(address, instance.peerAddress ?? "");
    keyed(models, specsOf(instance), (spec) => spec.fingerprint, makeChip);
    keyed(tiers, instance.tiers ?? [], (usage) => usage.name, makeTier);
    hits.update(instance.stats ?? {});
    const silence = fleet.silence(instance);
    const state = silence ? "lost" : instance.synced ? "live" : "rebuilding";
    setAttribute(reports, "data-state", state);
    const words = { lost: `silent for ${duration(silence)}`, live: "reporting", rebuilding: "sending its snapshot" };
    setText(word, words[state]);
    setText(engines, counted(instance.engineCount ?? 0, "engine"));
    setText(joined, `joined ${ago(serverNow() - seconds(instance.registerTime))}`);
    setAttribute(joined, "title", instance.version ? `lmkv ${instance.version}` : null);
    const sentences = conflictsOf(instance);
    keyed(conflicts, sentences, ([why]) => why, makeConflict);
    show(conflicts, sentences.length > 0);
  }

  return { element, update };
}

const specsOf = (instance) => instance.specs ?? [];

function makeChip() {
  const element = h("li");
  return {
    element,
    update(spec) {
      setText(element, `${spec.modelName} · ${spec.kvDtype}`);
      setAttribute(element, "title", `${spec.chunkSize} tokens a chunk, ${spec.layerCount} layers, ${spec.modelId}`);
    },
  };
}

function makeTier() {
  const name = h("span", { class: "name" });
  const bar = h("span", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 });
  const text = h("span", { class: "muted number" });
  return {
    element: h("li", {}, name, bar, text),
    update(usage) {
      const used = Number(usage.usedBytes ?? 0);
      const capacity = Number(usage.capacityBytes ?? 0);
      const fill = capacity ? Math.min(100, (100 * used) / capacity) : 0;
      const room = capacity ? bytesOf(used, capacity) : bytes(used);
      setText(name, usage.name);
      setAttribute(bar, "data-tier", usage.name);
      setAttribute(bar, "aria-label", usage.name);
      setAttribute(bar, "aria-valuenow", Math.round(fill));
      setAttribute(bar, "aria-valuetext", `${room}, ${percent(used, capacity)}`);
      setProperty(bar, "--fill", `${fill.toFixed(1)}%`);
      setText(text, `${room} · ${counted(Number(usage.chunkCount ?? 0), "chunk")}`);
    },
  };
}

/** An instance's hits among the chunks that its engines looked up: its own, and those of peers. */
function makeHits() {
  const own = h("span", { class: "segment", "data-source": "own" });
  const peer = h("span", { class: "segment", "data-source": "peer" });
  const bar = h("span", { class: "bar segments", role: "img" }, own, peer);
  const text = h("span", { class: "muted number" });
  return {
    element: h("div", { class: "hits" }, h("span", { class: "name" }, "hits"), bar, text),
    update({ askedChunks, ownChunks, peerChunks }) {
      const asked = Number(askedChunks ?? 0);
      const parts = [[own, Number(ownChunks ?? 0)], [peer, Number(peerChunks ?? 0)]];
      for (const [part, found] of parts) setProperty(part, "--width", `${asked ? ((100 * found) / asked).toFixed(1) : 0}%`);
      const [owned, fetched] = parts.map(([, found]) => percent(found, asked));
      const words = `${owned} own + ${fetched} peer of ${count(asked)}`;
      const label = `Hits: ${owned} own, ${fetched} from peers, of ${counted(asked, "chunk")} looked up`;
      setText(text, asked ? words : "nothing looked up yet");
      for (const name of ["aria-label", "title"]) setAttribute(bar, name, asked ? label : null);
      show(bar, asked > 0);
    },
  };
}

function makeConflict() {
  const element = h("li");
  return {
    element,
    update([why, { modelName, names }]) {
      const others = names.length > MAX_NAMED ? `${names.length} instances` : names.join(", ");
      setText(element, `Shares no ${modelName} with ${others}: ${why}`);
      setAttribute(element, "title", names.join(", "));
    },
  };
}

/** Instances that this one cannot share chunks with, by the differing field. */
function conflictsOf(instance) {
  const groups = new Map();
  for (const { modelName, instanceId, field, ownValue, otherValue } of instance.conflicts ?? []) {
    const why = `${field} is ${ownValue} here, ${otherValue} there`;
    const group = groups.get(why) ?? { modelName, names: [] };
    group.names.push(instanceId);
    groups.set(why, group);
  }
  return [...groups];
}
