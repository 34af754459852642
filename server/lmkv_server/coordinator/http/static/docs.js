// Shows /openapi.json: every path with its fields, and a form to try it.

const EMPTY = "{}";

const description = await (await fetch("/openapi.json")).json();
const schemas = description.components.schemas;
const main = document.getElementById("operations");

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const nameOf = (schema) => schema.$ref?.split("/").at(-1);
const resolved = (schema) => (schema?.$ref ? schemas[nameOf(schema)] : schema);

function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  return schema.format ?? schema.contentEncoding ?? schema.type ?? "anything";
}

function fieldsOf(title, schema) {
  const fields = Object.entries(resolved(schema)?.properties ?? {});
  if (!fields.length) return "";
  const required = new Set(resolved(schema).required);
  const rows = fields.map(([name, field]) =>
    element("tr", {},
      element("td", {}, element("code", {}, name), required.has(name) ? " (required)" : ""),
      element("td", { className: "faint" }, typeOf(field))));
  return element("table", {}, element("thead", {}, element("tr", {}, element("th", { colSpan: 2 }, title))),
    element("tbody", {}, ...rows));
}

async function send(method, path, body, output) {
  output.textContent = "...";
  try {
    const request = method === "post" ? { method, body, headers: { "Content-Type": "application/json" } } : { method };
    const response = await fetch(path, { ...request, signal: AbortSignal.timeout(60_000) });
    const text = await response.text();
    const isJson = response.headers.get("content-type").startsWith("application/json");
    output.textContent = `${response.status}\n${isJson ? JSON.stringify(JSON.parse(text), null, 2) : text}`;
  } catch (error) {
    output.textContent = String(error);
  }
}

function trial(method, path) {
  const body = element("textarea", { rows: 3, value: EMPTY, spellcheck: false, ariaLabel: `Body for ${path}` });
  const output = element("pre", { hidden: true, ariaLive: "polite" });
  const button = element("button", { type: "button" }, "Send");
  button.addEventListener("click", () => {
    output.hidden = false;
    send(method, path, body.value, output);
  });
  return element("div", {}, ...(method === "post" ? [body] : []), button, output);
}

function shown(path, method, operation) {
  const answers = Object.values(operation.responses["200"].content ?? {});
  const answer = answers[0]?.schema ?? {};
  const example = answer.examples?.[0];
  const isStream = "text/event-stream" in operation.responses["200"].content;
  return element("details", { id: path },
    element("summary", {}, element("b", {}, `${method.toUpperCase()} ${path}`), " ",
      element("span", { className: "faint" }, operation.summary)),
    element("div", {},
      fieldsOf("Body", operation.requestBody?.content["application/json"].schema),
      fieldsOf("Answer", answer),
      example ? element("pre", {}, JSON.stringify(example, null, 2)) : "",
      isStream ? element("p", { className: "faint" }, `curl -N ${location.origin}${path}`) : trial(method, path)));
}

function show(word) {
  const groups = new Map();
  for (const [path, item] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(item)) {
      if (!`${path} ${operation.summary}`.toLowerCase().includes(word.toLowerCase())) continue;
      const [tag] = operation.tags;
      groups.set(tag, [...(groups.get(tag) ?? []), shown(path, method, operation)]);
    }
  }
  const found = [...groups].flatMap(([tag, operations]) => [element("h2", {}, tag), ...operations]);
  main.replaceChildren(...(found.length ? found : [element("p", {}, "Nothing has this in its name.")]));
}

document.getElementById("version").textContent = description.info.version;
document.getElementById("find").addEventListener("input", (event) => show(event.target.value));
show("");
