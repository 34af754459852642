// A picture of what operations carried between instances: who to whom, how much, and what moves right now.

import { serverNow } from "./api.js";
import { byId, h, keyed, s, setAttribute, setText, show } from "./dom.js";
import { bytes, counted, tierName } from "./format.js";

const CENTRE = { x: 240, y: 185 };
const RADIUS = { x: 140, y: 148 };
const RECENT_SECONDS = 15;
const MAX_LABELLED = 14;
const LABEL_LENGTH = 15;

export class Traffic {
  #edges = s("g");
  #nodes = s("g");

  constructor() {
    byId("traffic").append(this.#edges, this.#nodes);
  }

  /** Brings the picture and the list beside it up to date. */
  show(fleet) {
    const flows = flowsOf(fleet.operations);
    const places = placesOf(fleet.instances, flows);
    const largest = Math.max(1, ...flows.map((flow) => flow.bytes));
    const drawn = flows.filter((flow) => flow.from !== flow.to);
    keyed(this.#nodes, [...places.values()], (place) => place.name, makeNode);
    keyed(this.#edges, drawn.map((flow) => curve(flow, places, largest)), (edge) => edge.key, makeEdge);
    keyed(byId("traffic-list"), flows, (flow) => flow.key, makeLine);
    show(byId("traffic-details"), flows.length > 0);
    const total = flows.reduce((sum, flow) => sum + flow.bytes, 0);
    setText(byId("traffic-total"), flows.length ? `${bytes(total)} lately` : "");
    setText(
      byId("traffic-caption"),
      `${flows.length ? "" : "Nothing has moved between instances lately. "}` +
        "Drawn is what moves and copies carried, in the colour of the tier it went to. " +
        "What engines fetch from peers by themselves is not told to the coordinator.",
    );
  }
}

/** Operations by their two ends, added up. */
function flowsOf(operations) {
  const flows = new Map();
  const now = serverNow();
  for (const { source, destination, bytes: size, chunkCount, done, endTime } of operations) {
    if (!source || !destination || (done && !chunkCount)) continue;
    const key = JSON.stringify([source.instanceId, source.tier, destination.instanceId, destination.tier]);
    const flow = flows.get(key) ?? flows.set(key, newFlow(key, source, destination)).get(key);
    flow.bytes += size;
    flow.chunks += chunkCount;
    flow.isRunning ||= !done;
    flow.isRecent ||= !done || now - endTime < RECENT_SECONDS;
  }
  return [...flows.values()].sort((one, other) => other.bytes - one.bytes);
}

function newFlow(key, source, destination) {
  const flow = { key, from: source.instanceId, to: destination.instanceId, tier: tierName(destination.tier) };
  const words = `${source.instanceId} / ${tierName(source.tier)} → ${destination.instanceId} / ${flow.tier}`;
  return { ...flow, words, bytes: 0, chunks: 0, isRunning: false, isRecent: false };
}

/** Instances on an ellipse, by name; those that left stay while something of them is drawn. */
function placesOf(instances, flows) {
  const present = new Set(instances.map((instance) => instance.instanceId));
  const active = new Set(flows.flatMap((flow) => [flow.from, flow.to]));
  const names = [...new Set([...present, ...active])].sort();
  const places = names.map((name, index) => {
    const angle = (2 * Math.PI * index) / names.length - Math.PI / 2;
    const x = CENTRE.x + RADIUS.x * Math.cos(angle);
    const y = CENTRE.y + RADIUS.y * Math.sin(angle);
    const isLabelled = names.length <= MAX_LABELLED || active.has(name);
    return { name, angle, x, y, isLabelled, isGone: !present.has(name), isActive: active.has(name) };
  });
  return new Map(places.map((place) => [place.name, place]));
}

function curve(flow, places, largest) {
  const [from, to] = [places.get(flow.from), places.get(flow.to)];
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy);
  // Bent towards the centre, and each direction to its own side.
  const bend = {
    x: (from.x + to.x) / 2 + ((CENTRE.x - (from.x + to.x) / 2) * 0.45 - (dy / length) * 26),
    y: (from.y + to.y) / 2 + ((CENTRE.y - (from.y + to.y) / 2) * 0.45 + (dx / length) * 26),
  };
  const [start, end] = [towards(from, bend, 11), towards(to, bend, 13)];
  const middle = { x: (start.x + 2 * bend.x + end.x) / 4, y: (start.y + 2 * bend.y + end.y) / 4 };
  const width = 1.5 + 4.5 * Math.sqrt(flow.bytes / largest);
  return {
    ...flow,
    path: `M${point(start)} Q${point(bend)} ${point(end)}`,
    arrow: arrow(middle, Math.atan2(end.y - start.y, end.x - start.x), 4 + width),
    width: width.toFixed(2),
  };
}

function towards(from, to, distance) {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  return { x: from.x + ((to.x - from.x) * distance) / length, y: from.y + ((to.y - from.y) * distance) / length };
}

function arrow({ x, y }, angle, size) {
  const corner = (turn, reach) => point({ x: x + reach * Math.cos(angle + turn), y: y + reach * Math.sin(angle + turn) });
  return `${corner(0, size)} ${corner(2.4, size)} ${corner(-2.4, size)}`;
}

const point = ({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`;
const shortened = (name) => (name.length > LABEL_LENGTH ? `${name.slice(0, LABEL_LENGTH - 1)}…` : name);

function makeNode() {
  const circle = s("circle", { r: 7 });
  const label = s("text", { dy: "0.35em" });
  const title = s("title");
  const element = s("g", { class: "node" }, title, circle, label);
  return {
    element,
    update(place) {
      setText(title, place.isGone ? `${place.name} (left the fleet)` : place.name);
      setText(label, place.isLabelled ? shortened(place.name) : "");
      setAttribute(circle, "cx", place.x.toFixed(1));
      setAttribute(circle, "cy", place.y.toFixed(1));
      const side = Math.cos(place.angle);
      setAttribute(label, "x", (place.x + 14 * side).toFixed(1));
      setAttribute(label, "y", (place.y + 20 * Math.sin(place.angle)).toFixed(1));
      setAttribute(label, "text-anchor", Math.abs(side) < 0.2 ? "middle" : side > 0 ? "start" : "end");
      setAttribute(element, "data-gone", place.isGone);
      setAttribute(element, "data-active", place.isActive);
    },
  };
}

function makeEdge() {
  const title = s("title");
  const glow = s("path", { class: "glow" });
  const line = s("path", { class: "line" });
  const head = s("polygon");
  const element = s("g", { class: "edge" }, title, glow, line, head);
  return {
    element,
    update(edge) {
      setText(title, wordsOf(edge));
      for (const path of [glow, line]) setAttribute(path, "d", edge.path);
      setAttribute(line, "stroke-width", edge.width);
      setAttribute(glow, "stroke-width", Number(edge.width) + 7);
      setAttribute(head, "points", edge.arrow);
      setAttribute(element, "data-tier", edge.tier);
      setAttribute(element, "data-state", edge.isRunning ? "running" : edge.isRecent ? "recent" : "past");
    },
  };
}

function makeLine() {
  const element = h("li");
  return { element, update: (flow) => setText(element, wordsOf(flow)) };
}

const wordsOf = (flow) => `${flow.words}: ${counted(flow.chunks, "chunk")}, ${bytes(flow.bytes)}`;
