// A line chart over time, drawn by uPlot. Colours come from the swatches of its legend, so that the style sheet sets them.

import { h, setAttribute, setText } from "./dom.js";

const HEIGHT = 132;
const FONT = "11px system-ui, sans-serif";
const BYTE_STEPS = Array.from({ length: 60 }, (_, power) => 2 ** power);
const STEPS = Array.from({ length: 16 }, (_, power) => 10 ** (power - 6)).flatMap((ten) => [ten, 2 * ten, 5 * ten]);
const charts = new Set();

/** `format` writes a value; `top` is the end of the scale, if it is fixed. */
export class Chart {
  #plot = null;
  #times = [];
  #series = [];
  #items = new Map();
  #frame = h("div", { class: "plot", role: "img" });
  #legend = h("ul", { class: "legend" });
  #caption = h("p", { class: "muted caption" });

  constructor(parent, { title, format, top = null, isBytes = false }) {
    this.title = title;
    this.format = format;
    this.top = top;
    this.isBytes = isBytes;
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("h3", {}, title), this.#legend),
      this.#frame,
      this.#caption,
    );
    parent.append(this.element);
    new ResizeObserver(() => this.#resize()).observe(this.#frame);
    charts.add(this);
  }

  /** Draws `series`, each `{name, colour, values}`, over `times`. `caption` says what the picture shows. */
  update(times, series, caption) {
    setText(this.#caption, caption);
    setAttribute(this.#frame, "aria-label", `${this.title}. ${caption}`);
    const isSame = this.#series.map(({ name }) => name).join() === series.map(({ name }) => name).join();
    this.#times = times;
    this.#series = series;
    if (!isSame || !this.#plot) this.#create();
    else this.#plot.setData(this.#data());
    this.#showValues(null);
  }

  /** Removes the chart. */
  remove() {
    charts.delete(this);
    this.#plot?.destroy();
    this.element.remove();
  }

  /** Draws again, with the colours of another theme. */
  redraw() {
    this.#plot?.redraw(false);
  }

  #data() {
    return [this.#times, ...this.#series.map(({ values }) => values)];
  }

  #create() {
    this.#plot?.destroy();
    this.#items = new Map(this.#series.map(({ name, colour }) => {
      const [swatch, value] = [h("span", { class: "swatch", ...colour }), h("span", { class: "number" })];
      return [name, { swatch, value, element: h("li", {}, swatch, name, " ", value) }];
    }));
    this.#legend.replaceChildren(...[...this.#items.values()].map(({ element }) => element));
    this.#plot = new uPlot(this.#options(), this.#data(), this.#frame);
  }

  #options() {
    const text = () => getComputedStyle(this.#caption).color;
    const line = () => getComputedStyle(this.#frame).borderTopColor;
    const axis = { stroke: text, font: FONT, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return {
      width: Math.max(120, this.#frame.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), this.top ?? (high > 0 ? 1.08 * high : 1)] } },
      axes: [
        { ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map(clock) },
        {
          ...axis,
          size: 58,
          space: 34,
          incrs: this.isBytes ? BYTE_STEPS : STEPS,
          values: (_, ticks) => ticks.map(this.format),
        },
      ],
      series: [{}, ...this.#series.map(({ name }) => this.#line(name))],
      hooks: { setCursor: [(plot) => this.#showValues(plot.cursor.idx)] },
    };
  }

  #line(name) {
    const colour = () => getComputedStyle(this.#items.get(name).swatch).backgroundColor;
    const fill = () => colour().replace("rgb(", "rgba(").replace(")", ", 0.12)");
    return { label: name, stroke: colour, fill, width: 1.75, points: { show: this.#times.length < 3, size: 5 } };
  }

  /** The values at the cursor; the last ones without it. */
  #showValues(index) {
    for (const { name, values } of this.#series) {
      const value = values[index ?? values.length - 1] ?? null;
      setText(this.#items.get(name).value, value === null ? "–" : this.format(value));
    }
  }

  #resize() {
    const width = this.#frame.clientWidth;
    if (this.#plot && width > 0 && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }
}

const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

function redrawAll() {
  for (const chart of charts) chart.redraw();
}

new MutationObserver(redrawAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
