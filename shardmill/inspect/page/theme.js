// Light, dark, or as the system has it.
//
// Promise: the choice is kept where the browser allows that, and works without.

import { show, svg } from "./dom.js";

const NEXT = { system: "light", light: "dark", dark: "system" };
const KEY = "shardmill-theme";
const SHAPES = {
  system: "M8 1a7 7 0 1 0 0 14a7 7 0 1 0 0-14zm0 1.4a5.6 5.6 0 1 1 0 11.2z",
  light:
    "M8 4.5a3.5 3.5 0 1 0 0 7a3.5 3.5 0 0 0 0-7zM7.4 0h1.2v3H7.4zM7.4 13h1.2v3H7.4zM0 7.4h3v1.2H0zM13 7.4h3v1.2h-3zM2.2 3.1l.9-.9 2.1 2.1-.9.9zM10.8 11.7l.9-.9 2.1 2.1-.9.9zM12.9 2.2l.9.9-2.1 2.1-.9-.9zM4.3 10.8l.9.9-2.1 2.1-.9-.9z",
  dark: "M13.9 10.2A6.5 6.5 0 0 1 5.8 2.1a6.5 6.5 0 1 0 8.1 8.1z",
};
let current = "system";

function kept() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is switched off: the choice lasts as long as the page
  }
}

function keep(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    return; // the same
  }
}

function set(theme, control) {
  current = theme;
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  control.setAttribute("aria-label", `Theme: ${theme}. Change to ${NEXT[theme]}`);
  control.title = `Theme: ${theme}`;
  show(
    control,
    svg(
      "svg",
      { viewBox: "0 0 16 16", width: 15, height: 15, "aria-hidden": "true", class: "icon" },
      svg("path", { d: SHAPES[theme] }),
    ),
  );
}

export function startTheme(control) {
  const found = kept();
  set(found in NEXT ? found : "system", control);
  control.addEventListener("click", () => {
    set(NEXT[current], control);
    keep(current);
  });
}
