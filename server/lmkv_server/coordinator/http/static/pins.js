// Active pins, their remaining time, and a button to end them.

import { RPC, call, seconds, serverNow } from "./api.js";
import { announce, byId, h, keyed, setAttribute, setText, show, whenClicked } from "./dom.js";
import { count, counted, duration } from "./format.js";

const MAX_SHOWN = 200;

/** Updates the list; shows the first of many pins. */
export function showPins(fleet) {
  const shown = fleet.pins.slice(0, MAX_SHOWN);
  keyed(byId("pins"), shown, (pin) => pin.pinId, () => makeRow(fleet));
  show(byId("pins-empty"), fleet.pins.length === 0);
  const isAll = shown.length === fleet.pins.length;
  setText(byId("pins-count"), isAll ? "" : `${count(shown.length)} of ${count(fleet.pins.length)}`);
}

function makeRow(fleet) {
  const title = h("h3");
  const facts = h("p", { class: "muted number" });
  const problem = h("p", { class: "error", hidden: true });
  const unpin = h("button", { type: "button", class: "small" }, "Unpin");
  let pinId = "";
  whenClicked(unpin, async () => {
    try {
      await call(RPC.unpin, { pinId });
      announce("The pin is gone");
    } catch (error) {
      setText(problem, error.message);
      show(problem, true);
    }
    await fleet.refresh();
  });

  function update(pin) {
    pinId = pin.pinId;
    const place = `${pin.position.instanceId} / ${pin.position.tier}`;
    setText(title, place);
    setAttribute(title, "title", pinId);
    const left = duration(Math.max(1, Math.round(seconds(pin.expireTime) - serverNow())));
    setText(facts, `${counted(pin.chunkCount ?? 0, "chunk")} · ${counted(pin.tokenCount ?? 0, "token")} · ${left} left`);
    setAttribute(unpin, "aria-label", `Unpin ${counted(pin.chunkCount ?? 0, "chunk")} on ${place}`);
  }

  return { element: h("li", { class: "pin" }, h("div", { class: "line" }, title, unpin), facts, problem), update };
}
