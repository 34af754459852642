// The one dialog: a form that acts, or a text. The browser keeps focus inside, closes it with Esc and gives focus back.

import { announce, byId, h, onceAtATime, setText, show } from "./dom.js";

/**
 * Asks for something and does it. `act()` returns what to say when it is done; if it throws, the dialog stays and says
 * why. Without `act` there is only a way out.
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
      const said = await act();
      dialog.close();
      announce(said);
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
