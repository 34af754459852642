// Dark or light. Runs before the first paint, so that a chosen theme does not flash in; else the system's is followed.

(() => {
  const THEMES = ["system", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem("lmkv-theme");
    } catch {
      return null; // storage may be forbidden; the choice then lasts as long as the page
    }
  }

  function apply(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
    try {
      localStorage.setItem("lmkv-theme", theme);
    } catch {
      // see above
    }
  }

  apply(THEMES.includes(stored()) ? stored() : "system");
  document.addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      apply(THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length]);
    });
  });
})();
