// Lookup of a prompt: its input, a bar per holder, and actions on the selected holder's copy.

import { Lost, RPC, call, tokenize, tokenizers } from "./api.js";
import { openClear, openMove, openPin } from "./actions.js";
import { byId, h, keyed, setAttribute, setProperty, setText, show, whenClicked } from "./dom.js";
import { showExplanation } from "./explanation.js";
import { count, counted, percent } from "./format.js";
import { commandsFor, promptOf, readSelection } from "./selection.js";

const MAX_FOLLOWED_TOKENS = 16_384;
/** Longer prompts are looked up on request only, not after every change. */

export class Prompt {
  #fleet;
  #tokenizers = [];
  #asked = null;
  #answer = null;
  #chosen = "";
  #number = 0;

  constructor(fleet) {
    this.#fleet = fleet;
    const input = byId("prompt-input");
    input.addEventListener("input", () => this.#showUnderstood());
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
    });
    byId("prompt-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    whenClicked(byId("prompt-explain"), () => this.#submit((request) => this.#explain(request)));
    for (const [id, open] of [
      ["act-move", (about) => openMove({ ...about, isCopy: false })],
      ["act-copy", (about) => openMove({ ...about, isCopy: true })],
      ["act-pin", openPin],
      ["act-clear", openClear],
    ]) {
      byId(id).addEventListener("click", () => open(this.#about()));
    }
    this.#learnTokenizers();
  }

  async #learnTokenizers() {
    try {
      this.#tokenizers = await tokenizers();
    } catch (error) {
      if (!(error instanceof Lost)) throw error; // the page shows elsewhere that the coordinator does not answer
    }
    this.#showUnderstood();
  }

  /** Updates the models, and the result if the layout changed. */
  show() {
    const models = this.#fleet.models();
    const choices = [{ value: "", words: "Choose a model" }, ...models.map((name) => ({ value: name, words: name }))];
    keyed(byId("prompt-model"), choices, (choice) => choice.value, makeOption);
    show(byId("prompt-model-field"), models.length > 1);
    const isFollowed = this.#asked && !this.#fleet.lost && (this.#asked.prompt.tokens?.tokenIds.length ?? 0) <= MAX_FOLLOWED_TOKENS;
    const isOld =
      Number(this.#answer?.revision) !== this.#fleet.revision || (this.#answer?.isComplete ?? false) !== this.#fleet.isComplete;
    if (isFollowed && isOld) this.#look();
  }

  #showUnderstood() {
    const selection = readSelection(byId("prompt-input").value);
    const words = {
      nothing: () => "",
      tokens: () => counted(selection.tokens.length, "token"),
      keys: () => counted(selection.keys.length, "chunk key"),
      wrong: () => selection.why,
      text: () => (this.#takesText() ? `${counted(selection.text.length, "character")} of text` : ""),
    };
    setText(byId("prompt-understood"), words[selection.kind]());
    const needsCommands = selection.kind === "text" && !this.#takesText();
    show(byId("prompt-text"), needsCommands);
    if (needsCommands) setText(byId("prompt-commands"), commandsFor(selection.text, this.#model()));
    return selection;
  }

  /** Whether the coordinator has a tokenizer of the model, or of any model. */
  #takesText() {
    const model = this.#model();
    return model ? this.#tokenizers.includes(model) : this.#tokenizers.length > 0;
  }

  #model() {
    const models = this.#fleet.models(); // sent even if there is one only, because a name may have several specs
    return models.length === 1 ? models[0] : byId("prompt-model").value;
  }

  /** Reads the form and looks the prompt up, or passes it to another `act`. */
  async #submit(act = (request) => this.#follow(request)) {
    showExplanation(null);
    const number = ++this.#number; // ignores responses to earlier lookups
    let selection = this.#showUnderstood();
    if (selection.kind === "text" && this.#takesText()) {
      this.#asked = null; // stops updating the earlier lookup
      show(byId("prompt-result"), false);
      selection = await this.#tokensOf(selection.text, number);
      if (number !== this.#number) return;
    }
    if (selection.kind !== "tokens" && selection.kind !== "keys") {
      this.#asked = null;
      show(byId("prompt-result"), false);
      const why = { nothing: "Paste a prompt first.", text: "Text needs a tokenizer; see above.", wrong: selection.why };
      this.#showProblem(why[selection.kind], selection.isAboutModel);
      byId("prompt-input").focus();
      return;
    }
    const fields = { modelName: this.#model(), cacheSalt: byId("prompt-salt").value, loraName: byId("prompt-lora").value };
    await act({ prompt: promptOf(selection, fields) });
  }

  #follow(request) {
    this.#asked = request;
    this.#answer = null;
    this.#look();
  }

  /** Asks the instances where the prompt is for them; what was looked up stays. */
  async #explain(request) {
    const number = ++this.#number;
    try {
      const answer = await call(RPC.explain, request);
      if (number !== this.#number) return;
      this.#showProblem(answer.explanations?.length ? "" : "No instance serves this prompt's model.");
      showExplanation(answer);
    } catch (error) {
      if (number === this.#number) this.#showProblem(error.message, isAboutModel(error));
    }
  }

  /** The tokens of a text, or why they are unknown. */
  async #tokensOf(text, number) {
    try {
      const tokens = await tokenize(text, this.#model());
      if (number === this.#number) setText(byId("prompt-understood"), counted(tokens.length, "token"));
      return { kind: "tokens", tokens };
    } catch (error) {
      return { kind: "wrong", why: error.message, isAboutModel: isAboutModel(error) };
    }
  }

  async #look() {
    const number = ++this.#number;
    const asked = this.#asked;
    try {
      const answer = await call(RPC.lookup, asked);
      if (number !== this.#number) return;
      this.#answer = answer;
      this.#showProblem("");
      this.#showAnswer();
    } catch (error) {
      if (number !== this.#number || (this.#fleet.lost && !error.reason)) return;
      show(byId("prompt-result"), false);
      this.#showProblem(error.message, isAboutModel(error));
    }
  }

  #showProblem(words, mayChoose = false) {
    setText(byId("prompt-error"), words);
    show(byId("prompt-error"), words !== "");
    const models = mayChoose ? this.#fleet.models() : [];
    keyed(byId("prompt-offers"), models, (name) => name, (name) => this.#makeOffer(name));
    show(byId("prompt-offers"), models.length > 0);
  }

  #makeOffer(name) {
    const choose = () => {
      byId("prompt-model").value = name;
      byId("prompt-input").focus();
      this.#submit();
    };
    return { element: h("button", { type: "button", onclick: choose }, name), update() {} };
  }

  #showAnswer() {
    const holders = this.#answer.holders ?? [];
    const length = lengthOf(this.#asked);
    if (!holders.some((holder) => holder.instanceId === this.#chosen)) this.#chosen = holders[0]?.instanceId ?? "";
    keyed(byId("prompt-holders"), holders, (holder) => holder.instanceId, () => this.#makeHolder());
    const best = Math.max(0, ...holders.map((holder) => matched(holder, this.#asked)));
    const found = holders.length
      ? `${counted(holders.length, "instance")} ${holders.length === 1 ? "holds" : "hold"} a beginning of it; ` +
        `the longest is ${percent(best, length)}.`
      : "No instance holds a prefix of it.";
    setText(byId("prompt-summary"), this.#answer.isComplete ? found : `${found} The map is being rebuilt: more may be held.`);
    show(byId("prompt-holders-field"), holders.length > 0);
    show(byId("prompt-actions"), holders.length > 0);
    setText(byId("prompt-chosen"), `The copy on ${this.#chosen}:`);
    show(byId("prompt-result"), true);
  }

  #makeHolder() {
    const radio = h("input", { type: "radio", name: "holder" });
    const name = h("span", { class: "name" });
    const tiers = h("span", { class: "muted" });
    const bar = h("span", { class: "bar segments", role: "img" });
    const text = h("span", { class: "number" });
    const element = h("label", { class: "holder" }, radio, h("span", {}, name, " ", tiers), bar, text);
    radio.addEventListener("change", () => {
      this.#chosen = radio.value;
      setText(byId("prompt-chosen"), `The copy on ${this.#chosen}:`);
    });
    const update = (holder) => {
      const length = lengthOf(this.#asked);
      const part = matched(holder, this.#asked);
      radio.value = holder.instanceId;
      radio.checked = holder.instanceId === this.#chosen;
      setText(name, holder.instanceId);
      setText(tiers, [...new Set((holder.runs ?? []).map((run) => run.tier))].join(" + "));
      const unit = this.#asked.prompt.tokens ? "tokens" : "chunks";
      setText(text, `${count(part)} of ${count(length)} ${unit} · ${percent(part, length)}`);
      const runs = (holder.runs ?? []).map((run, index) => ({ ...run, index, length, asked: this.#asked }));
      keyed(bar, runs, (run) => run.index, makeSegment);
      setAttribute(bar, "aria-label", runs.map((run) => `${count(matched(run, this.#asked))} in ${run.tier}`).join(", "));
    };
    return { element, update };
  }

  #about() {
    const holder = this.#answer.holders.find(({ instanceId }) => instanceId === this.#chosen);
    const holders = new Set(this.#answer.holders.map(({ instanceId }) => instanceId));
    return { fleet: this.#fleet, holder, holders, selection: this.#asked };
  }
}

/** Whether selecting another model may help. */
const isAboutModel = (error) => ["MODEL_AMBIGUOUS", "MODEL_NOT_FOUND"].includes(error.reason);

/** Length of the prompt: in tokens if known, otherwise in chunks. */
const lengthOf = ({ prompt }) => prompt.tokens?.tokenIds.length ?? prompt.keys.chunkKeys.length;

function matched(part, asked) {
  return (asked.prompt.tokens ? (part.matchedTokenCount ?? part.tokenCount) : (part.matchedChunkCount ?? part.chunkCount)) ?? 0;
}

function makeSegment() {
  const element = h("span", { class: "segment" });
  return {
    element,
    update(run) {
      const part = matched(run, run.asked);
      setAttribute(element, "data-tier", run.tier);
      setAttribute(element, "title", `${count(part)} in ${run.tier}`);
      setProperty(element, "--width", `${((100 * part) / run.length).toFixed(2)}%`);
    },
  };
}

function makeOption(choice) {
  return { element: h("option", { value: choice.value }, choice.words), update() {} };
}
