// The dialogs that act on one holder's copy of a prompt: move, copy, pin, clear.

import { RPC, call, newRequestId } from "./api.js";
import { field, openDialog } from "./dialog.js";
import { h } from "./dom.js";
import { counted } from "./format.js";

/** Moves or copies to a chosen position. */
export function openMove({ fleet, holder, holders, selection, isCopy }) {
  const requestId = newRequestId();
  const source = tierSelect(holder);
  const places = destinations(fleet, holder);
  const options = places.map((place) => h("option", { value: place.value, disabled: place.why !== "" }, place.words));
  const destination = h("select", {}, ...options);
  const fit = places.filter((place) => !place.why);
  const first = fit.find((place) => !holders.has(place.instanceId)) ?? fit[0];
  if (first) destination.value = first.value;
  const verb = isCopy ? "Copy" : "Move";
  openDialog({
    title: `${verb} this prompt`,
    lead: isCopy
      ? `${holder.instanceId} keeps its chunks; the destination fetches and verifies its own.`
      : `The destination fetches and verifies ${describe(holder)}; only then does ${holder.instanceId} drop them.`,
    body: first
      ? [field("From", source), field("To", destination)]
      : [h("p", {}, "There is no other instance that could hold these chunks. Start one, and it shows up here.")],
    confirm: verb,
    act: first && (async () => {
      await call(RPC.move, {
        ...selection,
        oldPosition: { instanceId: holder.instanceId, tier: source.value },
        newPosition: JSON.parse(destination.value),
        copy: isCopy,
        requestId,
      });
      fleet.refresh();
      return `The ${verb.toLowerCase()} has begun`;
    }),
  });
}

/** Pins for a chosen time. */
export function openPin({ fleet, holder, selection }) {
  const requestId = newRequestId();
  const tier = tierSelect(holder);
  const minutes = h("input", { type: "number", min: 1, max: 10_080, value: 5, required: true, inputmode: "numeric" });
  openDialog({
    title: "Pin this prompt",
    lead: `${holder.instanceId} keeps ${describe(holder)} from eviction until the time is over. It may grant less.`,
    body: [field("In", tier), field("Minutes", minutes)],
    confirm: "Pin",
    act: async () => {
      const position = { instanceId: holder.instanceId, tier: tier.value };
      const { pin } = await call(RPC.pin, { ...selection, position, ttl: `${Number(minutes.value) * 60}s`, requestId });
      fleet.refresh();
      return `${counted(pin.chunkCount ?? 0, "chunk")} pinned`;
    },
  });
}

/** Clears one instance or all; the dialog is the confirmation. */
export function openClear({ fleet, holder, selection }) {
  const requestId = newRequestId();
  const where = h("select", {}, option(holder.instanceId, `Only ${holder.instanceId}`), option("", "Every instance"));
  const dryRun = h("input", { type: "checkbox", id: "dialog-dry-run" });
  openDialog({
    title: "Clear this prompt",
    lead: `Forgets ${describe(holder)}. Engines that ask for this prompt again must compute it. Pinned chunks stay.`,
    body: [
      field("Where", where),
      h("div", { class: "check" }, dryRun, h("label", { for: dryRun.id }, "Only count what would go")),
    ],
    confirm: "Clear",
    isDanger: true,
    act: async () => {
      await call(RPC.clear, { ...selection, instanceId: where.value, dryRun: dryRun.checked, requestId });
      fleet.refresh();
      return dryRun.checked ? "The count has begun" : "The clear has begun";
    },
  });
}

const option = (value, words) => h("option", { value }, words);
const describe = (holder) => `${counted(holder.matchedChunkCount ?? 0, "chunk")} (${counted(holder.matchedTokenCount ?? 0, "token")})`;

function tierSelect(holder) {
  const tiers = [...new Set((holder.runs ?? []).map((run) => run.tier))];
  return h("select", {}, ...tiers.map((tier) => option(tier, `${holder.instanceId} / ${tier}`)));
}

/** Tiers of one instance alone: chunks can be moved between them. */
const INSTANCE_TIERS = new Set(["gpu", "host", "disk"]);

/** All positions; those that cannot take the chunks are disabled, with the reason. */
function destinations(fleet, holder) {
  const held = new Set((holder.runs ?? []).map((run) => run.tier));
  const own = fleet.instances.find((instance) => instance.instanceId === holder.instanceId);
  const specs = new Set((own?.specs ?? []).map((spec) => spec.fingerprint));
  return fleet.instances.flatMap((instance) => {
    const isSame = instance.instanceId === holder.instanceId;
    const conflict = (instance.conflicts ?? []).find((found) => found.instanceId === holder.instanceId);
    const isShared = (instance.specs ?? []).some((spec) => specs.has(spec.fingerprint));
    const why = isShared ? "" : conflict ? ` (${conflict.field} differs)` : " (other model)";
    const tiers = (instance.tiers ?? []).map((usage) => usage.tier).filter((tier) => INSTANCE_TIERS.has(tier));
    return tiers
      .filter((tier) => !(isSame && held.size === 1 && held.has(tier)))
      .map((tier) => ({
        instanceId: instance.instanceId,
        why,
        words: `${instance.instanceId} / ${tier}${why}`,
        value: JSON.stringify({ instanceId: instance.instanceId, tier }),
      }));
  });
}
