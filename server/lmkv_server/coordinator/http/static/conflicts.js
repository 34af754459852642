// Why instances of a model cannot share chunks, by reason. The specs show it: the conflicts that each instance lists are
// at most 16, so they serve only to know for which models there are any.

import { byId, h, keyed, setAttribute, setText, show } from "./dom.js";
import { counted } from "./format.js";

const MAX_NAMED = 4;
/** Fields of a spec that do not differ for a reason of their own. */
const IGNORED = new Set(["fingerprint", "modelName"]);

/** Updates the list of reasons. */
export function showConflicts(fleet) {
  const reasons = reasonsOf(fleet.instances);
  keyed(byId("conflicts"), reasons, ({ key }) => key, makeReason);
  show(byId("conflicts"), reasons.length > 0);
}

/**
 * The reasons: per model, the first field in which a spec differs from the spec of most instances, and the instances by
 * the field's value.
 */
export function reasonsOf(instances) {
  const models = new Set(instances.flatMap(({ conflicts }) => (conflicts ?? []).map(({ modelName }) => modelName)));
  return [...models].sort().flatMap((modelName) => {
    const [common, ...others] = variantsOf(instances, modelName);
    const reasons = new Map();
    for (const { spec, names } of others) {
      const field = firstDifference(common.spec, spec);
      if (!reasons.has(field)) reasons.set(field, new Map([[valueOf(common.spec, field), common.names]]));
      const value = valueOf(spec, field);
      reasons.get(field).set(value, [...(reasons.get(field).get(value) ?? []), ...names]);
    }
    return [...reasons].map(([field, values]) => ({ key: `${modelName} ${field}`, modelName, field, values }));
  });
}

/** The specs of a model and the instances of each, the most common spec first. */
function variantsOf(instances, modelName) {
  const variants = new Map();
  for (const { instanceId, specs } of instances) {
    for (const spec of specs ?? []) {
      if (spec.modelName !== modelName) continue;
      if (!variants.has(spec.fingerprint)) variants.set(spec.fingerprint, { spec: withParts(spec), names: [] });
      variants.get(spec.fingerprint).names.push(instanceId);
    }
  }
  return [...variants.values()].sort((one, other) => other.names.length - one.names.length);
}

/** A spec with the fields of its further parts beside its own, such as `moreParts[0].span`. */
function withParts({ moreParts = [], ...spec }) {
  const fields = moreParts.flatMap((part, index) =>
    Object.entries(part).map(([field, value]) => [`moreParts[${index}].${field}`, value]),
  );
  return { ...spec, ...Object.fromEntries(fields) };
}

function firstDifference(one, other) {
  const fields = Object.keys({ ...one, ...other }).filter((field) => !IGNORED.has(field));
  return fields.find((field) => valueOf(one, field) !== valueOf(other, field)) ?? "fingerprint";
}

/** A field's value as text; the API leaves out fields that are 0, false or empty. */
const valueOf = (spec, field) => {
  const value = spec[field] ?? "not set";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
};
const fieldName = (field) => field.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

function makeReason() {
  const element = h("li");
  return {
    element,
    update({ modelName, field, values }) {
      const sides = [...values].map(([value, names]) => `${value} on ${namesOf(names)}`).join(", ");
      setText(element, `Instances of ${modelName} cannot share chunks: ${fieldName(field)} is ${sides}`);
      setAttribute(element, "title", [...values].map(([value, names]) => `${value}: ${names.join(", ")}`).join("\n"));
    },
  };
}

function namesOf(names) {
  const which = names.length <= MAX_NAMED ? ` (${names.join(", ")})` : "";
  return names.length === 1 ? names[0] : `${counted(names.length, "instance")}${which}`;
}
