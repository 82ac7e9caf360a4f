"use strict";
// Light and dark: the system's, until the button says otherwise.

const Theme = {
  key: "gnmr-report-theme",
  listeners: [],
  known: new Map(), // asking the browser costs a recalculation of styles

  isDark() {
    const chosen = document.documentElement.style.colorScheme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },

  /** The value of a custom property as a colour that a canvas knows. */
  color(name) {
    if (!Theme.known.has(name)) {
      Theme.probe.style.color = `var(--${name})`;
      Theme.known.set(name, getComputedStyle(Theme.probe).color);
    }
    return Theme.known.get(name);
  },

  show() {
    const other = Theme.isDark() ? "Light" : "Dark";
    Theme.button.textContent = other;
    Theme.button.setAttribute("aria-label", `${other} colours`);
    Theme.known.clear();
    for (const listener of Theme.listeners) {
      listener();
    }
  },

  choose(scheme) {
    document.documentElement.style.colorScheme = scheme;
    try {
      localStorage.setItem(Theme.key, scheme);
    } catch {
      // a page from a file may have no storage: the choice then lasts as long as the page
    }
    Theme.show();
  },

  start() {
    Theme.probe = document.createElement("span");
    Theme.probe.hidden = true;
    document.body.append(Theme.probe);
    Theme.button = document.getElementById("theme");
    Theme.button.hidden = false;
    Theme.button.addEventListener("click", () => Theme.choose(Theme.isDark() ? "light" : "dark"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", Theme.show);
    let saved = null;
    try {
      saved = localStorage.getItem(Theme.key);
    } catch {
      // as above
    }
    if (saved === "light" || saved === "dark") {
      document.documentElement.style.colorScheme = saved;
    }
    Theme.show();
  },
};
