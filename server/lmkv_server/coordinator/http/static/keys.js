// Single-key shortcuts. They can be switched off, because speech input may trigger them (WCAG 2.1.4).

import { byId, h } from "./dom.js";
import { openDialog } from "./dialog.js";

const STORED = "lmkv-shortcuts";
const EDITABLE = "input, textarea, select, [contenteditable]";

/** Starts listening. */
export function listenToKeys(fleet) {
  const shortcuts = {
    "/": ["Name a prompt", () => byId("prompt-input").focus()],
    f: ["Filter the instances", () => byId("instances-filter").focus()],
    i: ["Go to the instances", () => goTo("instances-title")],
    h: ["Go to the history", () => goTo("history-title")],
    v: ["Go to the traffic", () => goTo("traffic-title")],
    o: ["Go to the operations", () => goTo("operations-title")],
    p: ["Go to the pins", () => goTo("pins-title")],
    r: ["Ask the coordinator now", () => fleet.refresh()],
    t: ["Change the theme", () => byId("theme").click()],
    "?": ["Show this list", () => openHelp(shortcuts)],
  };
  byId("help").addEventListener("click", () => openHelp(shortcuts));
  document.addEventListener("keydown", (event) => {
    const isTaken = event.ctrlKey || event.metaKey || event.altKey || event.target.closest(EDITABLE);
    if (isTaken || document.querySelector("dialog[open]") || !areOn()) return;
    const shortcut = Object.hasOwn(shortcuts, event.key) ? shortcuts[event.key] : null;
    if (!shortcut) return;
    event.preventDefault();
    shortcut[1]();
  });
}

function goTo(id) {
  byId(id).scrollIntoView({ block: "start" });
  byId(id).focus({ preventScroll: true });
}

function openHelp(shortcuts) {
  const others = { "Ctrl Enter": ["Look the prompt up, from its text field"], Esc: ["Close a dialog"] };
  const lines = Object.entries({ ...shortcuts, ...others }).map(([key, [words]]) =>
    h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)),
  );
  const isOn = h("input", { type: "checkbox", id: "shortcuts-on", onchange: () => store(isOn.checked) });
  isOn.checked = areOn();
  openDialog({
    title: "Keyboard",
    body: [
      h("dl", { class: "keys" }, ...lines),
      h("div", { class: "check" }, isOn, h("label", { for: "shortcuts-on" }, "Shortcuts of a single key are on")),
    ],
  });
}

function areOn() {
  try {
    return localStorage.getItem(STORED) !== "off";
  } catch {
    return true;
  }
}

function store(isOn) {
  try {
    localStorage.setItem(STORED, isOn ? "on" : "off");
  } catch {
    // storage may be blocked; shortcuts are then always on
  }
}
