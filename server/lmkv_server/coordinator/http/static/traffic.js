// Transfers between instances: a ring with direction, bytes and current transfers; a heat map of larger fleets.

import { byId, h, keyed, s, setAttribute, setText, show } from "./dom.js";
import { flowText, shortened } from "./flow_text.js";
import { bytes, count } from "./format.js";
import { HeatMap } from "./heatmap.js";

const CENTRE = { x: 240, y: 185 };
const RADIUS = { x: 140, y: 148 };
const WIDTH = 480;
const RING_HEIGHT = 370;
/** With more instances, the diagram is a heat map. */
const MAX_RING = 16;
/** Width of the screen in pixels below which a heat map has fewer and larger names. */
const NARROW = 640;
/** Of more flows, the list has the current and the largest ones. */
const MAX_LISTED = 200;

export class Traffic {
  #edges = s("g");
  #nodes = s("g");
  #ring = s("g", {}, this.#edges, this.#nodes);
  #map = new HeatMap();

  constructor() {
    byId("traffic").append(this.#ring, this.#map.element);
  }

  /** Updates the diagram and the list. */
  show(fleet) {
    const flows = fleet.flows;
    const places = placesOf(fleet.instances, flows);
    const isRing = places.size <= MAX_RING;
    const height = isRing ? RING_HEIGHT : flows.length ? this.#map.show(flows, innerWidth <= NARROW) : 0;
    if (isRing) this.#showRing(places, flows);
    show(this.#ring, isRing);
    show(this.#map.element, !isRing);
    setAttribute(byId("traffic"), "viewBox", `0 0 ${WIDTH} ${Math.ceil(height)}`);
    const listed = flows.toSorted(byInterest).slice(0, MAX_LISTED);
    keyed(byId("traffic-list"), listed, (flow) => flow.key, makeLine);
    show(byId("traffic"), isRing ? places.size > 0 : flows.length > 0);
    show(byId("traffic-details"), flows.length > 0);
    const total = flows.reduce((sum, flow) => sum + flow.bytes, 0);
    setText(byId("traffic-total"), total ? `${bytes(total)} fetched` : "");
    setText(byId("traffic-caption"), captionOf(flows.length, listed.length, isRing));
  }

  #showRing(places, flows) {
    const largest = Math.max(1, ...flows.map((flow) => flow.bytes));
    const widest = Math.min(6, 18 / Math.sqrt(flows.length));
    const widthOf = (size) => 1.2 + (widest - 1.2) * Math.sqrt(size / largest);
    keyed(this.#nodes, [...places.values()], (place) => place.name, makeNode);
    keyed(this.#edges, flows.map((flow) => curve(flow, places, widthOf)), (edge) => edge.key, makeEdge);
  }
}

const rank = (flow) => 2 * flow.isRunning + flow.isRecent;
const byInterest = (one, other) => rank(other) - rank(one); // stable: keeps the order by bytes

function captionOf(all, listed, isRing) {
  if (!all) return "No instance has fetched anything from another since it started.";
  const cut = listed < all ? ` The list has ${count(listed)} of ${count(all)} flows.` : "";
  return isRing
    ? "What instances fetched from each other since they started; wider is more. " +
        `What has just come glows, moves and copies under way are dashed.${cut}`
    : "What instances (rows) fetched from others (columns) since they started; " +
        "a stronger colour is more, on a logarithmic scale. " +
        `What has just come, and moves and copies under way, have a frame.${cut}`;
}

/** Instances on a circle, by name; those that left stay while a flow of them is drawn. */
function placesOf(instances, flows) {
  const present = new Set(instances.map((instance) => instance.instanceId));
  const active = new Set(flows.flatMap((flow) => [flow.from, flow.to]));
  const names = [...new Set([...present, ...active])].sort();
  const places = names.map((name, index) => {
    const angle = (2 * Math.PI * index) / names.length - Math.PI / 2;
    const x = CENTRE.x + RADIUS.x * Math.cos(angle);
    const y = CENTRE.y + RADIUS.y * Math.sin(angle);
    return { name, angle, x, y, size: 7, isGone: !present.has(name), isActive: active.has(name) };
  });
  return new Map(places.map((place) => [place.name, place]));
}

function curve(flow, places, widthOf) {
  const [from, to] = [places.get(flow.from), places.get(flow.to)];
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy);
  // Curved towards the centre, each direction on its own side.
  const bend = {
    x: (from.x + to.x) / 2 + ((CENTRE.x - (from.x + to.x) / 2) * 0.45 - (dy / length) * 26),
    y: (from.y + to.y) / 2 + ((CENTRE.y - (from.y + to.y) / 2) * 0.45 + (dx / length) * 26),
  };
  const [start, end] = [towards(from, bend, from.size + 4), towards(to, bend, to.size + 6)];
  const middle = { x: (start.x + 2 * bend.x + end.x) / 4, y: (start.y + 2 * bend.y + end.y) / 4 };
  const width = widthOf(flow.bytes);
  return {
    ...flow,
    path: `M${point(start)} Q${point(bend)} ${point(end)}`,
    arrow: arrow(middle, Math.atan2(end.y - start.y, end.x - start.x), 2.5 + 1.2 * width),
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

function makeNode() {
  const circle = s("circle");
  const label = s("text", { dy: "0.35em" });
  const title = s("title");
  const element = s("g", { class: "node" }, title, circle, label);
  return {
    element,
    update(place) {
      setText(title, place.isGone ? `${place.name} (left the fleet)` : place.name);
      setText(label, shortened(place.name));
      setAttribute(circle, "cx", place.x.toFixed(1));
      setAttribute(circle, "cy", place.y.toFixed(1));
      setAttribute(circle, "r", place.size.toFixed(1));
      const { x, y, anchor } = labelPlace(place);
      setAttribute(label, "text-anchor", anchor);
      setAttribute(label, "transform", `translate(${point({ x, y })})`);
      setAttribute(element, "data-gone", place.isGone);
      setAttribute(element, "data-active", place.isActive);
    },
  };
}

/** Position of a label: beside its instance. */
function labelPlace({ x, y, angle }) {
  const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
  const anchor = Math.abs(cos) < 0.2 ? "middle" : cos > 0 ? "start" : "end";
  return { x: x + 14 * cos, y: y + 20 * sin, anchor };
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
      setText(title, flowText(edge));
      for (const path of [glow, line]) setAttribute(path, "d", edge.path);
      setAttribute(line, "stroke-width", edge.width);
      setAttribute(glow, "stroke-width", 2.2 * Number(edge.width) + 3);
      setAttribute(head, "points", edge.arrow);
      setAttribute(element, "data-state", edge.isRunning ? "running" : edge.isRecent ? "recent" : "past");
    },
  };
}

function makeLine() {
  const element = h("li");
  return { element, update: (flow) => setText(element, flowText(flow)) };
}
