// The last hour: hit rate, bytes by tier, and the TTFT that loads saved; of the fleet or of one instance.

import { history } from "./api.js";
import { Chart } from "./chart.js";
import { byId, setText, show } from "./dom.js";
import { bytes, count, counted, duration, percent } from "./format.js";

/** Charts of the samples, in an element. */
export class History {
  #rate;
  #used;
  #saved;

  constructor(parent) {
    this.#rate = new Chart(parent, { title: "Hit rate of engines", format: (value) => `${Math.round(value)} %`, top: 100 });
    this.#used = new Chart(parent, { title: "Bytes by tier", format: bytes, isBytes: true });
    this.#saved = new Chart(parent, { title: "TTFT saved by a load", format: signed });
  }

  /** Shows samples, as `/history` sends them. */
  show(samples) {
    const { times } = samples;
    this.#showRate(times, samples);
    const tiers = Object.entries(samples.used_bytes);
    const used = tiers.map(([name, values]) => ({ name, colour: { "data-tier": name }, values }));
    const now = tiers.reduce((sum, [, values]) => sum + (values.at(-1) ?? 0), 0);
    this.#used.update(times, used, tiers.length ? `${bytes(now)} now` : "No tier has been reported.");
    this.#showSaved(times, samples);
  }

  /** Removes the charts. */
  remove() {
    for (const chart of [this.#rate, this.#used, this.#saved]) chart.remove();
  }

  #showRate(times, { asked_chunks: asked, own_chunks: own, peer_chunks: peer }) {
    const rate = (...found) => asked.map((all, at) => (all ? found.reduce((sum, of) => sum + of[at], 0) * (100 / all) : null));
    const series = [
      { name: "all", colour: { "data-source": "peer" }, values: rate(own, peer) },
      { name: "own", colour: { "data-source": "own" }, values: rate(own) },
    ];
    const all = sum(asked);
    const caption = all
      ? `${percent(sum(own) + sum(peer), all)} of ${counted(all, "chunk")}`
      : "Engines have looked nothing up.";
    this.#rate.update(times, series, caption);
  }

  #showSaved(times, { load_count: loads, load_seconds: took, avoided_prefill_seconds: avoided }) {
    const saved = loads.map((number, at) => (number ? (avoided[at] - took[at]) / number : null));
    const total = sum(avoided) - sum(took);
    const caption = sum(loads)
      ? `${signed(total)} in ${counted(sum(loads), "load")}, estimated`
      : "No load yet of an engine that has measured its prefill rate.";
    this.#saved.update(times, [{ name: "average", colour: { "data-tier": "remote" }, values: saved }], caption);
  }
}

/** Keeps the charts of the page up to date: a new sample comes every `period_seconds`. */
export class FleetHistory {
  #history = null;
  #asked = -Infinity;
  #period = 5;

  /** Reads the samples if there may be new ones. */
  async show() {
    const now = performance.now() / 1000;
    if (now < this.#asked + this.#period) return;
    this.#asked = now;
    let samples;
    try {
      samples = await history();
    } catch {
      return; // the page shows elsewhere that the coordinator does not answer
    }
    const { times } = samples;
    this.#period = times.length ? Math.max(5, samples.period_seconds / 3) : 5;
    const span = times.length > 1 ? times.at(-1) - times[0] : 0;
    setText(byId("history-span"), span > 0 ? `last ${duration(span)}, a sample every ${count(samples.period_seconds)} s` : "");
    show(byId("history-empty"), times.length === 0);
    show(byId("history"), times.length > 0);
    if (times.length === 0) return;
    this.#history ??= new History(byId("history"));
    this.#history.show(samples);
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const signed = (seconds) => (seconds < 0 ? `−${duration(-seconds)}` : duration(seconds));
