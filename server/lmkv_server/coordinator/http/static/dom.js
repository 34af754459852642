// Creates elements, and updates them only where something changed. API content is always inserted as text.

const SVG = "http://www.w3.org/2000/svg";
const rowsOf = new WeakMap();

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; children that are strings become text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element with attributes and children. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else setAttribute(element, name, value);
  }
  element.append(...children);
  return element;
}

/** Sets an attribute if it differs; null and false remove it. */
export function setAttribute(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Sets the text of an element if it differs. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Sets a custom property, which the style sheet maps to a width or a colour. */
export function setProperty(element, name, value) {
  const wanted = String(value);
  if (element.style.getPropertyValue(name) !== wanted) element.style.setProperty(name, wanted);
}

/** Shows or hides. Focus inside a hidden element moves to the heading of its section. */
export function show(element, isShown) {
  if (element.hasAttribute("hidden") === !isShown) return;
  if (!isShown) rescueFocus(element);
  element.toggleAttribute("hidden", !isShown); // SVG has no such property
}

/**
 * Makes the children of `parent` one row per item, in their order. `create(item)` returns `{element, update(item)}`;
 * existing rows are updated in place.
 */
export function keyed(parent, items, keyOf, create) {
  const rows = rowsOf.get(parent) ?? rowsOf.set(parent, new Map()).get(parent);
  const keys = new Set(items.map(keyOf));
  for (const [key, row] of rows) {
    if (keys.has(key)) continue;
    rescueFocus(row.element);
    row.element.remove();
    rows.delete(key);
  }
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const row = rows.get(key) ?? rows.set(key, create(item)).get(key);
    row.update(item);
    if (row.element === next) next = next.nextElementSibling;
    else parent.insertBefore(row.element, next);
  }
}

/** Runs an action when a button is clicked, one at a time. Disabling the button meanwhile would lose focus. */
export function whenClicked(button, act) {
  button.addEventListener("click", () => onceAtATime(button, act));
}

/** Runs an action unless the button's last one is still running. */
export async function onceAtATime(button, act) {
  if (button.hasAttribute("aria-disabled")) return;
  button.setAttribute("aria-disabled", "true");
  try {
    await act();
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

/** Announces a text to screen readers. */
export function announce(text) {
  setText(byId("announcement"), text);
}

function rescueFocus(element) {
  if (element.contains(document.activeElement)) element.closest("section")?.querySelector("h2")?.focus();
}
