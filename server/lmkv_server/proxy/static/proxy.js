// Refreshes the page: fetches it every second while it is visible, and replaces what has changed. The regions that
// scroll and have the focus stay.

const PARTS = ["state", "figures", "engines", "latencies"];

async function refresh() {
  if (document.hidden) return;
  try {
    const response = await fetch("/", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const id of PARTS) {
      const [old, next] = [document.getElementById(id), fresh.getElementById(id)];
      if (old.outerHTML !== next.outerHTML) old.replaceWith(next);
    }
  } catch {
    const state = document.getElementById("state");
    state.dataset.state = "lost";
    state.lastElementChild.textContent = "The proxy does not answer";
  }
}

setInterval(refresh, 1000);
document.addEventListener("visibilitychange", refresh);
