// Transfers as a matrix, for fleets that are too large for the ring: a row for each reader, a column for each source.

import { keyed, s, setAttribute, setText } from "./dom.js";
import { count } from "./format.js";
import { flowText, shortened } from "./flow_text.js";

const MAX_SIDE = 32;
/** On a narrow screen, so that names can be read. */
const MAX_SIDE_NARROW = 14;
const SIZE = 480;
/** Width of a letter, in font sizes. */
const LETTER = 0.62;
const byName = new Intl.Collator("en", { numeric: true }).compare;
const OTHERS = ""; // no instance has an empty id

/** Draws into a group of the diagram. Of many instances, those with the most bytes have a row or column of their own. */
export class HeatMap {
  element = s("g", { class: "heat" });
  #cells = s("g");
  #rows = s("g");
  #columns = s("g");

  constructor() {
    this.element.append(this.#cells, this.#rows, this.#columns);
  }

  /** Updates the matrix; returns its height. */
  show(flows, isNarrow) {
    const rows = sideOf(flows, "to", isNarrow ? MAX_SIDE_NARROW : MAX_SIDE);
    const columns = sideOf(flows, "from", isNarrow ? MAX_SIDE_NARROW : MAX_SIDE);
    const cells = cellsOf(flows, rows, columns);
    const largest = Math.log1p(Math.max(1, ...cells.map((cell) => cell.bytes)));
    const longest = Math.max(...[...rows.labels, ...columns.labels].map(({ text }) => text.length));
    const font = isNarrow ? 14 : Math.max(rows.length, columns.length) > 20 ? 8.5 : 11;
    const width = font * LETTER * longest;
    const margin = { left: width + 8, top: 0.87 * width + 12 }; // labels of columns are turned by 60 degrees
    const step = Math.min(26, (SIZE - margin.left - width / 2) / columns.length);
    const drawn = cells.map((cell) => ({
      ...cell,
      x: margin.left + cell.column * step,
      y: margin.top + cell.row * step,
      size: step - 1,
      heat: Math.log1p(cell.bytes) / largest,
    }));
    const middle = (index) => ((index + 0.5) * step).toFixed(1);
    const atRow = (index) => `translate(${margin.left - 5},${middle(index)}) translate(0,${margin.top})`;
    const atColumn = (index) => `translate(${margin.left},${margin.top - 5}) translate(${middle(index)},0) rotate(-60)`;
    keyed(this.#cells, drawn, ({ key }) => key, makeCell);
    keyed(this.#rows, placed(rows.labels, atRow), ({ name }) => name, ({ name }) => makeLabel(name, "end"));
    keyed(this.#columns, placed(columns.labels, atColumn), ({ name }) => name, ({ name }) => makeLabel(name, "start"));
    for (const group of [this.#rows, this.#columns]) setAttribute(group, "font-size", font);
    return margin.top + rows.labels.length * step + 8;
  }
}

/** The instances of one side by name; those with the fewest bytes together, last. */
function sideOf(flows, end, maxSide) {
  const sizes = new Map();
  for (const flow of flows) sizes.set(flow[end], (sizes.get(flow[end]) ?? 0) + flow.bytes);
  const ordered = [...sizes].sort(([, one], [, other]) => other - one).map(([name]) => name);
  const isCut = ordered.length > maxSide;
  const shown = ordered.slice(0, isCut ? maxSide - 1 : maxSide).sort(byName);
  const labels = shown.map((name) => ({ name, text: shortened(name) }));
  if (isCut) labels.push({ name: OTHERS, text: `${count(ordered.length - shown.length)} others` });
  const indexes = new Map(labels.map(({ name }, index) => [name, index]));
  return { labels, length: labels.length, indexOf: (name) => indexes.get(name) ?? indexes.get(OTHERS) };
}

function cellsOf(flows, rows, columns) {
  const cells = new Map();
  for (const flow of flows) {
    const [row, column] = [rows.indexOf(flow.to), columns.indexOf(flow.from)];
    const key = `${rows.labels[row].name}\n${columns.labels[column].name}`;
    const ends = { to: fullName(rows.labels[row]), from: fullName(columns.labels[column]) };
    const cell = cells.get(key) ?? { key, row, column, ...ends, chunks: 0, bytes: 0, isRunning: false, isRecent: false };
    cell.chunks += flow.chunks;
    cell.bytes += flow.bytes;
    cell.isRunning ||= flow.isRunning;
    cell.isRecent ||= flow.isRecent;
    cells.set(key, cell);
  }
  return [...cells.values()];
}

const fullName = ({ name, text }) => name || text;
const placed = (labels, place) => labels.map((label, index) => ({ ...label, transform: place(index) }));

function makeCell() {
  const title = s("title");
  const rect = s("rect", { rx: 1.5 });
  const element = s("g", { class: "cell" }, title, rect);
  const update = (cell) => {
    setText(title, flowText(cell));
    for (const [name, value] of [["x", cell.x], ["y", cell.y], ["width", cell.size], ["height", cell.size]]) {
      setAttribute(rect, name, value.toFixed(1));
    }
    setAttribute(rect, "fill-opacity", (0.12 + 0.88 * cell.heat ** 3).toFixed(2));
    setAttribute(element, "data-state", cell.isRunning ? "running" : cell.isRecent ? "recent" : "past");
  };
  return { element, update };
}

function makeLabel(name, anchor) {
  const title = s("title");
  const words = s("text", { dy: "0.35em", "text-anchor": anchor });
  const element = s("g", { class: name ? "label" : "label others" }, title, words);
  const update = ({ text, transform }) => {
    setText(title, name || text);
    setText(words, text);
    setAttribute(element, "transform", transform);
  };
  return { element, update };
}
