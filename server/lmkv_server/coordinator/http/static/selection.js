// Parses the input that names a prompt into the fields of a request.

const HEX_KEY = /^(?:[0-9a-f]{32})+$/i;
const TOKEN = /^-?\d+$/;
const MAX_TOKEN = 2 ** 31 - 1;

/** The parsed input: `{kind: "tokens" | "keys" | "text" | "nothing" | "wrong", ...}`. */
export function readSelection(pasted) {
  const text = pasted.trim();
  if (!text) return { kind: "nothing" };
  const fromJson = readJson(text);
  if (fromJson) return fromJson;
  const words = text.replace(/^[[(]|[\])]$/g, "").split(/[\s,;]+/).filter(Boolean);
  if (words.length && words.every((word) => TOKEN.test(word) && word.length < 12)) return tokens(words.map(Number));
  if (words.length && words.every((word) => HEX_KEY.test(word))) return keys(words.join(""));
  return { kind: "text", text };
}

/** The `PromptSelector` of the parsed input; `fields` are further ones of tokens. */
export function promptOf(selection, fields) {
  if (selection.kind === "keys") return { keys: { chunkKeys: selection.keys } };
  return { tokens: { tokenIds: selection.tokens, ...fields } };
}

function readJson(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return null;
  }
  if (value && !Array.isArray(value)) value = value.tokens ?? value.prompt_token_ids ?? value.token_ids;
  if (!Array.isArray(value)) return null;
  if (value.every((item) => typeof item === "number")) return tokens(value);
  if (value.length && value.every((item) => typeof item === "string" && HEX_KEY.test(item))) return keys(value.join(""));
  return null;
}

function tokens(numbers) {
  if (!numbers.length) return { kind: "nothing" };
  const wrong = numbers.find((number) => !Number.isInteger(number) || number < 0 || number > MAX_TOKEN);
  return wrong === undefined ? { kind: "tokens", tokens: numbers } : { kind: "wrong", why: `${wrong} is no token id` };
}

function keys(hex) {
  const bytes = (key) => key.match(/../g).map((pair) => Number.parseInt(pair, 16));
  return { kind: "keys", keys: hex.match(/.{32}/g).map((key) => btoa(String.fromCharCode(...bytes(key)))) };
}

/** Shell commands that tokenize a text, quoted safely. */
export function commandsFor(text, model) {
  const quote = (words) => `'${words.replaceAll("'", `'\\''`)}'`;
  const body = JSON.stringify({ model: model || "MODEL", prompt: text });
  return (
    `curl -s http://ENGINE:8000/tokenize -H 'Content-Type: application/json' -d ${quote(body)}\n` +
    `lmkv lookup --model TOKENIZER_FOLDER --prompt ${quote(text)}`
  );
}
