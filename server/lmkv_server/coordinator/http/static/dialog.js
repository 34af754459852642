// The dialog: a form with an action, or a text. The browser traps focus, closes it with Esc and restores focus.

import { announce, byId, h, onceAtATime, setText, show } from "./dom.js";

/**
 * Opens the dialog. `act()` returns the message to announce when it is done; if it throws, the dialog stays open and
 * shows the error. Without `act` the dialog can only be closed.
 */
export function openDialog({ title, lead = "", body = [], confirm = "", isDanger = false, act = null }) {
  const dialog = byId("dialog");
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const close = h("button", { type: "button", onclick: () => dialog.close() }, act ? "Not now" : "Close");
  const submit = h("button", { type: "submit", class: isDanger ? "danger solid" : "primary" }, confirm);
  const form = h(
    "form",
    {},
    h("h2", { id: "dialog-title" }, title),
    ...(lead ? [h("p", { class: "lead" }, lead)] : []),
    ...body,
    problem,
    h("div", { class: "buttons" }, close, ...(act ? [submit] : [])),
  );
  const attempt = async () => {
    show(problem, false);
    try {
      const message = await act();
      dialog.close();
      announce(message);
    } catch (error) {
      setText(problem, error.message);
      show(problem, true);
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (act) onceAtATime(submit, attempt);
  });
  dialog.replaceChildren(form);
  dialog.showModal();
  (form.querySelector("select, input") ?? close).focus();
}

/** A labelled field of a dialog. */
export function field(label, control) {
  control.id = `dialog-${label.toLowerCase().replaceAll(" ", "-")}`;
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
}
