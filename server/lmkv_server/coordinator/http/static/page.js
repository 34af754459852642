// The page: one `Fleet` that polls, and sections that show its state.

import { showConflicts } from "./conflicts.js";
import { Detail } from "./detail.js";
import { byId, setAttribute, setText, show } from "./dom.js";
import { Fleet } from "./fleet.js";
import { bytesOf, count, counted, percent } from "./format.js";
import { FleetHistory } from "./history.js";
import { Instances, hitsOf } from "./instances.js";
import { listenToKeys } from "./keys.js";
import { showOperations } from "./operations.js";
import { showPins } from "./pins.js";
import { Prompt } from "./prompt.js";
import { Traffic } from "./traffic.js";

const fleet = new Fleet();
const detail = new Detail(fleet);
const instances = new Instances(fleet, (instanceId) => detail.open(instanceId));
const fleetHistory = new FleetHistory();
const prompt = new Prompt(fleet);
const traffic = new Traffic();

fleet.addEventListener("change", () => {
  showState();
  if (!fleet.isKnown) return;
  showFigures();
  instances.show();
  showConflicts(fleet);
  detail.show();
  showOperations(fleet);
  showPins(fleet);
  traffic.show(fleet);
  prompt.show();
  if (!fleet.lost) fleetHistory.show();
});

function showState() {
  const state = fleet.lost ? "lost" : !fleet.isComplete ? "rebuilding" : "live";
  const words = { lost: "Connection lost", rebuilding: "Rebuilding", live: "Live" };
  setAttribute(byId("state"), "data-state", state);
  setText(byId("state-text"), words[state]);
  setAttribute(byId("state"), "title", state === "rebuilding" ? "More may be held than is shown" : null);
  show(byId("lost"), fleet.lost !== null);
  if (fleet.lost) setText(byId("lost-text"), `${fleet.lost}. Below is what was known last; the page keeps trying.`);
  document.body.classList.toggle("stale", fleet.lost !== null);
}

function showFigures() {
  const tiers = fleet.instances.flatMap((instance) => instance.tiers ?? []);
  const sum = (field) => tiers.reduce((total, tier) => total + Number(tier[field] ?? 0), 0);
  const engines = fleet.instances.reduce((total, instance) => total + (instance.engineCount ?? 0), 0);
  const running = fleet.operations.filter((operation) => !operation.done).length;
  setText(byId("figure-instances"), count(fleet.instances.length));
  setText(byId("figure-engines"), `${counted(engines, "engine")} attached`);
  setText(byId("figure-chunks"), count(sum("chunkCount")));
  setText(byId("figure-used"), tiers.length ? bytesOf(sum("usedBytes"), sum("capacityBytes")) : "no tier yet");
  const hits = fleet.instances.map((instance) => hitsOf(instance.stats));
  const asked = hits.reduce((total, hit) => total + hit.asked, 0);
  const found = hits.reduce((total, hit) => total + hit.own + hit.peer, 0);
  setText(byId("figure-rate"), asked ? percent(found, asked) : "–");
  setText(byId("figure-asked"), asked ? `of ${counted(asked, "chunk")}` : "nothing looked up yet");
  setText(byId("figure-lookups"), fleet.lookups ? count(fleet.lookups) : "–");
  setText(byId("figure-hits"), fleet.lookups ? `${percent(fleet.hits, fleet.lookups)} found a holder` : "none since its start");
  setText(byId("figure-running"), count(running));
  setText(byId("figure-ended"), `${count(fleet.operations.length - running)} ended lately`);
}

setText(byId("address"), location.host);
byId("retry").addEventListener("click", () => fleet.refresh());
listenToKeys(fleet);
fleet.start();
