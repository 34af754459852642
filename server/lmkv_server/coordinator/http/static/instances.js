// The table of instances: sorted by a column, filtered by a text and a state. A name opens the instance's details.

import { announce, byId, h, keyed, setAttribute, setProperty, setText, show } from "./dom.js";
import { ago, bytes, bytesOf, count, counted, duration, percent } from "./format.js";
import { seconds, serverNow } from "./api.js";

const MAX_TIERS = 5;
const STATES = { live: "reporting", rebuilding: "sending its snapshot" };

/** Whether an instance is `live`, `rebuilding` (its snapshot is not complete) or `lost` (its report is overdue). */
export const stateOf = (fleet, instance) =>
  fleet.silence(instance) ? "lost" : instance.synced ? "live" : "rebuilding";

/** The state in words. */
export function stateText(fleet, instance) {
  const state = stateOf(fleet, instance);
  return STATES[state] ?? `silent for ${duration(fleet.silence(instance))}`;
}

/** Chunks that an instance's engines looked up, and where they were found. */
export function hitsOf({ askedChunks, ownChunks, peerChunks } = {}) {
  return { asked: Number(askedChunks ?? 0), own: Number(ownChunks ?? 0), peer: Number(peerChunks ?? 0) };
}

/** A tier's usage as numbers. `text` names bytes, `fill` is in percent. */
export function usageOf(usage) {
  const [used, capacity] = [Number(usage?.usedBytes ?? 0), Number(usage?.capacityBytes ?? 0)];
  const fill = capacity ? Math.min(100, (100 * used) / capacity) : 0;
  return { used, capacity, fill, text: capacity ? bytesOf(used, capacity) : bytes(used) };
}

export class Instances {
  #fleet;
  #sort = { key: "name", descending: false };
  #columns = [];

  constructor(fleet, open) {
    this.#fleet = fleet;
    this.open = open;
    byId("instances-filter").addEventListener("input", () => this.show());
    byId("instances-state").addEventListener("change", () => this.show());
  }

  /** Updates the table. */
  show() {
    const all = this.#fleet.instances;
    this.#columns = this.#columnsOf(all);
    const shown = this.#sorted(all.filter((instance) => this.#isWanted(instance)));
    keyed(byId("instances-columns"), this.#columns, ({ key }) => key, (column) => this.#makeHeader(column));
    const focused = document.activeElement;
    keyed(byId("instances"), shown, (instance) => instance.instanceId, () => this.#makeRow());
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true }); // its row moved
    show(byId("instances-table"), all.length > 0);
    show(byId("instances-tools"), all.length > 0);
    show(byId("instances-empty"), all.length === 0);
    show(byId("instances-none"), all.length > 0 && shown.length === 0);
    setText(byId("instances-count"), shown.length < all.length ? `${count(shown.length)} of ${count(all.length)}` : "");
  }

  #isWanted(instance) {
    const state = byId("instances-state").value;
    const hasState = { "": true, conflict: Boolean(instance.conflicts?.length) }[state];
    if (!(hasState ?? stateOf(this.#fleet, instance) === state)) return false;
    const models = (instance.specs ?? []).flatMap((spec) => [spec.modelName, spec.kvDtype]);
    const text = [instance.instanceId, instance.peerAddress, instance.version, ...models].join(" ").toLowerCase();
    return byId("instances-filter").value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  #sorted(instances) {
    const column = this.#columns.find(({ key }) => key === this.#sort.key) ?? this.#columns[0];
    const direction = this.#sort.descending ? -1 : 1;
    const byName = (one, other) => names.compare(one.instanceId, other.instanceId);
    return instances.toSorted((one, other) => {
      const [left, right] = [column.value(one), column.value(other)];
      const order = typeof left === "string" ? names.compare(left, right) : left - right;
      return direction * order || byName(one, other);
    });
  }

  #columnsOf(instances) {
    const fleet = this.#fleet;
    const tiers = [...new Set(instances.flatMap((instance) => (instance.tiers ?? []).map((usage) => usage.tier)))];
    const state = { lost: 0, rebuilding: 1, live: 2 };
    return [
      { key: "name", title: "Instance", value: ({ instanceId }) => instanceId, make: () => this.#makeName() },
      { key: "state", title: "State", value: (one) => state[stateOf(fleet, one)], make: () => makeState(fleet) },
      { key: "model", title: "Model", value: modelsOf, make: () => makeText(modelsOf), isMinor: true },
      { key: "engines", title: "Engines", value: enginesOf, make: () => makeText(enginesOf, count), isMinor: true },
      ...tiers.slice(0, MAX_TIERS).map((name, index) => ({
        key: `tier ${name}`,
        title: name,
        tier: name,
        value: (instance) => usageOf(tierOf(instance, name)).fill,
        make: () => makeTier(name),
        isMinor: index > 0,
      })),
      { key: "chunks", title: "Chunks", value: chunksOf, make: () => makeText(chunksOf, count), isMinor: true },
      { key: "hits", title: "Hits", value: rateOf, make: makeHits },
      { key: "joined", title: "Joined", value: (one) => -joinedOf(one), make: makeJoined, isMinor: true },
    ];
  }

  #makeHeader({ key, title, tier, isMinor }) {
    const swatch = tier ? [h("span", { class: "swatch", "data-tier": tier })] : [];
    const button = h("button", { type: "button", class: "sort" }, ...swatch, title);
    button.addEventListener("click", () => {
      const descending = this.#sort.key === key ? !this.#sort.descending : false;
      this.#sort = { key, descending };
      this.show();
      announce(`Sorted by ${title}, ${descending ? "descending" : "ascending"}`);
    });
    const element = h("th", { scope: "col", "data-column": key, "data-minor": isMinor ?? false }, button);
    const update = () => {
      const order = this.#sort.descending ? "descending" : "ascending";
      setAttribute(element, "aria-sort", this.#sort.key === key ? order : null);
    };
    return { element, update };
  }

  #makeRow() {
    const element = h("tr", { class: "instance" });
    const update = (instance) => {
      const cells = this.#columns.map((column) => ({ column, instance }));
      keyed(element, cells, ({ column }) => column.key, ({ column }) => {
        const cell = column.make();
        setAttribute(cell.element, "data-column", column.key);
        setAttribute(cell.element, "data-minor", column.isMinor ?? false);
        return { element: cell.element, update: (item) => cell.update(item.instance) };
      });
    };
    return { element, update };
  }

  #makeName() {
    let instanceId = "";
    const button = h("button", { type: "button", class: "link", onclick: () => this.open(instanceId) });
    const update = (instance) => {
      instanceId = instance.instanceId;
      setText(button, instanceId);
      setAttribute(button, "title", instance.peerAddress ?? null);
    };
    return { element: h("th", { scope: "row" }, button), update };
  }
}

const names = new Intl.Collator("en", { numeric: true });
const tierOf = (instance, name) => (instance.tiers ?? []).find((usage) => usage.tier === name);
const modelsOf = (instance) => [...new Set((instance.specs ?? []).map((spec) => `${spec.modelName} · ${spec.kvDtype}`))].join(", ");
const enginesOf = (instance) => instance.engineCount ?? 0;
const chunksOf = (instance) => (instance.tiers ?? []).reduce((sum, tier) => sum + Number(tier.chunkCount ?? 0), 0);
const joinedOf = (instance) => seconds(instance.registerTime) ?? 0;
const rateOf = (instance) => {
  const { asked, own, peer } = hitsOf(instance.stats);
  return asked ? (own + peer) / asked : -1;
};

function makeText(valueOf, format = (value) => value) {
  const isNumber = format === count;
  const element = h("td", { class: isNumber ? "number" : null });
  const update = (instance) => {
    setText(element, format(valueOf(instance)));
    if (!isNumber) setAttribute(element, "title", valueOf(instance));
  };
  return { element, update };
}

function makeState(fleet) {
  const word = h("span", { class: "word" });
  const state = h("span", { class: "reports" }, h("span", { class: "dot" }), word);
  const update = (instance) => {
    setAttribute(state, "data-state", stateOf(fleet, instance));
    setText(word, stateText(fleet, instance));
    setAttribute(state, "title", stateText(fleet, instance));
  };
  return { element: h("td", {}, state), update };
}

function makeTier(name) {
  const bar = h("span", { class: "bar", "data-tier": name, role: "meter", "aria-label": name });
  const text = h("span", { class: "number" });
  const cell = h("span", { class: "meter" }, bar, text);
  const update = (instance) => {
    const usage = tierOf(instance, name);
    const { used, capacity, fill, text: room } = usageOf(usage);
    show(cell, usage !== undefined);
    show(bar, capacity > 0);
    setAttribute(bar, "aria-valuemin", 0);
    setAttribute(bar, "aria-valuemax", 100);
    setAttribute(bar, "aria-valuenow", Math.round(fill));
    setAttribute(bar, "aria-valuetext", `${room}, ${percent(used, capacity)}`);
    setAttribute(cell, "title", `${room} · ${counted(Number(usage?.chunkCount ?? 0), "chunk")}`);
    setProperty(bar, "--fill", `${fill.toFixed(1)}%`);
    setText(text, capacity ? percent(used, capacity) : bytes(used));
  };
  return { element: h("td", {}, cell), update };
}

/** A bar of an instance's hits, by where they were found. */
export function makeHitsBar() {
  const own = h("span", { class: "segment", "data-source": "own" });
  const peer = h("span", { class: "segment", "data-source": "peer" });
  const bar = h("span", { class: "bar segments", role: "img" }, own, peer);
  const update = (stats) => {
    const { asked, ...found } = hitsOf(stats);
    for (const [segment, chunks] of [[own, found.own], [peer, found.peer]]) {
      setProperty(segment, "--width", `${asked ? ((100 * chunks) / asked).toFixed(1) : 0}%`);
    }
    const label = `Hits: ${hitsText(stats)}, of ${counted(asked, "chunk")} looked up`;
    for (const name of ["aria-label", "title"]) setAttribute(bar, name, asked ? label : null);
    show(bar, asked > 0);
  };
  return { element: bar, update };
}

/** `62 % own, 25 % from peers`. */
export function hitsText(stats) {
  const { asked, own, peer } = hitsOf(stats);
  return `${percent(own, asked)} own, ${percent(peer, asked)} from peers`;
}

function makeHits() {
  const bar = makeHitsBar();
  const text = h("span", { class: "number" });
  const update = ({ stats }) => {
    const { asked, own, peer } = hitsOf(stats);
    bar.update(stats);
    setText(text, asked ? percent(own + peer, asked) : "–");
    setAttribute(text, "title", asked ? null : "nothing looked up yet");
  };
  return { element: h("td", {}, h("span", { class: "meter hits" }, bar.element, text)), update };
}

function makeJoined() {
  const element = h("td", { class: "muted" });
  const update = (instance) => {
    setText(element, ago(serverNow() - joinedOf(instance)));
    setAttribute(element, "title", instance.version ? `lmkv ${instance.version}` : null);
  };
  return { element, update };
}
