// The coordinator's RPCs as JSON, and their errors.

const TIMEOUT_MS = 10_000;
const PAGE_SIZE = 100; // bounds the time that one answer takes of the coordinator's event loop

export const RPC = {
  instances: "lmkv.v1.RegistryService/ListInstances",
  lookup: "lmkv.v1.CacheService/Lookup",
  explain: "lmkv.v1.CacheService/Explain",
  move: "lmkv.v1.CacheService/Move",
  clear: "lmkv.v1.CacheService/Clear",
  pin: "lmkv.v1.CacheService/Pin",
  unpin: "lmkv.v1.CacheService/Unpin",
  pins: "lmkv.v1.CacheService/ListPins",
  operations: "google.longrunning.Operations/ListOperations",
  cancel: "google.longrunning.Operations/CancelOperation",
};

/** The coordinator returned an error; `reason` is one of `lmkv.errors`. */
export class Refused extends Error {
  constructor(status) {
    super(status.message || "refused without a word");
    this.reason = status.details?.[0]?.reason ?? "";
  }
}

/** No answer, or not one of a coordinator. */
export class Lost extends Error {}

let skewSeconds = 0;

/** Seconds since 1970 by the coordinator's clock, accurate to a second. */
export const serverNow = () => Date.now() / 1000 + skewSeconds;

/** Seconds since 1970 of a timestamp; null if there is none. */
export const seconds = (timestamp) => (timestamp ? Date.parse(timestamp) / 1000 : null);

/** Calls an RPC. Throws `Refused` or `Lost`. */
export const call = (rpc, request = {}) => post(`/${rpc}`, request);

/** The token ids of a text, from the coordinator's tokenizer of a model. Throws `Refused` or `Lost`. */
export async function tokenize(prompt, model) {
  return (await post("/tokenize", { prompt, model })).tokens;
}

async function post(path, request) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
  });
  return answerOf(response);
}

async function answerOf(response) {
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new Lost(`What answers is no coordinator (HTTP ${response.status})`);
  }
  if (!response.ok) throw new Refused(answer.error ?? answer);
  return answer;
}

/** All entries of a list, page by page. */
export async function list(rpc, field) {
  const entries = [];
  let pageToken = "";
  do {
    const page = await call(rpc, { pageSize: PAGE_SIZE, pageToken });
    entries.push(...(page[field] ?? []));
    pageToken = page.nextPageToken ?? "";
  } while (pageToken);
  return entries;
}

/** The models for which the coordinator has a tokenizer. Throws `Lost`. */
export async function tokenizers() {
  return (await (await ask("/tokenizers", {})).json()).models;
}

/** The samples of the last hour, of the fleet or of one instance. Throws `Refused` or `Lost`. */
export async function history(instanceId = "") {
  const query = instanceId ? `?${new URLSearchParams({ instance_id: instanceId })}` : "";
  return answerOf(await ask(`/history${query}`, {}));
}

/** The values of coordinator metrics without labels. */
export async function metrics(names) {
  const response = await ask("/metrics", {});
  const text = await response.text();
  return names.map((name) => Number(text.match(new RegExp(`^${name} (\\S+)$`, "m"))?.[1] ?? NaN));
}

/** A UUID; `crypto.randomUUID` exists only with TLS or on localhost. */
export function newRequestId() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  random[6] = (random[6] & 0x0f) | 0x40;
  random[8] = (random[8] & 0x3f) | 0x80;
  const hex = Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

async function ask(path, options) {
  try {
    const response = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    const date = Date.parse(response.headers.get("Date") ?? "");
    if (date) skewSeconds = Math.abs(date - Date.now()) < 2000 ? 0 : (date - Date.now()) / 1000;
    return response;
  } catch (error) {
    throw new Lost(error.name === "TimeoutError" ? "No answer came in time" : "The connection was refused or broke");
  }
}
