// Where the parts of a prompt are for each instance, and why others are missing.

import { seconds, serverNow } from "./api.js";
import { byId, h, show } from "./dom.js";
import { count, duration } from "./format.js";

/** Shows the answer to an explanation; without one, nothing. */
export function showExplanation(answer) {
  const explanations = answer?.explanations ?? [];
  byId("prompt-spans").replaceChildren(...explanations.flatMap(rowsOf));
  show(byId("prompt-explanation"), explanations.length > 0);
}

function rowsOf({ instanceId, explanation, error }) {
  if (error) return [row(instanceId, "", error.message, "")];
  let position = 0;
  return (explanation?.spans ?? []).map((span) => {
    const begin = position;
    position += span.tokenCount ?? 0;
    const tokens = `${count(begin)}–${count(Math.max(begin, position - 1))}`;
    if (!span.reason) return row(instanceId, tokens, `held in ${span.tier}`, "");
    const why = span.reason.replace("MISS_REASON_", "").toLowerCase().replaceAll("_", " ");
    const place = span.tier ? ` (${span.tier})` : "";
    const time = seconds(span.removeTime);
    return row(instanceId, tokens, `missing: ${why}${place}`, time ? `${duration(Math.max(0, serverNow() - time))} ago` : "");
  });
}

function row(instanceId, tokens, where, since) {
  return h(
    "tr",
    {},
    h("td", {}, instanceId),
    h("td", { class: "number" }, tokens),
    h("td", {}, where),
    h("td", { class: "number" }, since),
  );
}
