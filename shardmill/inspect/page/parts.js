// What several views are made of: tables, pagers, errors, empty states, facts.
//
// In: values and calls.  Out: elements.
// Promise: tables have headers with scopes; a failed question is shown in the server's words with
// a retry.
// Not here: charts, tokens.

import { ApiError, wasLeft } from "./api.js";
import { announce, button, el, link, show } from "./dom.js";
import { count, plural, range } from "./format.js";
import { make } from "./route.js";

/** columns: [{name, cell(row)}], with `number` for figures and `head` for what names a row. */
export function table(columns, rows, { caption } = {}) {
  const head = columns.map((one) =>
    el("th", { scope: "col", class: one.number && "number" }, one.name),
  );
  const cell = (one, row) =>
    el(
      one.head ? "th" : "td",
      { scope: one.head && "row", class: one.number && "number" },
      one.cell(row),
    );
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      columns.map((one) => cell(one, row)),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      {},
      caption && el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, head)),
      el("tbody", {}, body),
    ),
  );
}

export const facts = (pairs) =>
  el(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );

/** `go(start)` opens another page. `stop`: where this one ends, when an answer may be shorter. */
export function pager({ start, limit, total, what, go, stop = Math.min(start + limit, total) }) {
  return el(
    "div",
    { class: "pager" },
    button("First", () => go(0), { disabled: start === 0 }),
    button("Previous", () => go(Math.max(0, start - limit)), { disabled: start === 0 }),
    el("span", {}, total === 0 ? `no ${what}` : `${range(start, stop)} of ${count(total)} ${what}`),
    button("Next", () => go(stop), { disabled: stop >= total }),
    button("Last", () => go(Math.max(0, Math.floor((total - 1) / limit) * limit)), {
      disabled: stop >= total,
    }),
  );
}

export const empty = (title, ...what) =>
  el(
    "div",
    { class: "empty" },
    el("p", { class: "empty-title" }, title),
    what.map((one) => el("p", {}, one)),
  );

export const code = (text) => el("code", {}, text);

/** What went wrong; of something that does not exist, with a way home. */
export function failure(error, retry) {
  return el(
    "div",
    { class: "failure", role: "alert" },
    el("p", {}, error.message),
    retry && button("Try again", retry),
    error.status === 404 && link("Go to the overview", make({ store: 0, view: "overview" })),
  );
}

/** An error for what an address names and what does not exist. */
export const missing = (message) => new ApiError(message, 404);

/** Fill `place` with what `work` gives; show that it is under way, or what went wrong. */
export async function into(place, work, title = null) {
  place.setAttribute("aria-busy", "true");
  if (!place.hasChildNodes()) show(place, el("p", { class: "waiting" }, "Reading\u2026"));
  try {
    const made = await work();
    if (made !== undefined) show(place, made);
  } catch (error) {
    if (wasLeft(error)) return;
    show(
      place,
      title && el("h1", {}, title),
      failure(error, () => {
        show(place);
        into(place, work, title);
      }),
    );
    announce(`Error: ${error.message}`);
    if (error.name === "TypeError" || error.name === "ReferenceError") throw error;
  } finally {
    place.removeAttribute("aria-busy");
  }
}

/** Buttons of which one is pressed. */
export function choice(name, options, chosen, pick) {
  return el(
    "div",
    { class: "choice", role: "group", "aria-label": name },
    options.map(([value, text]) =>
      button(text, () => pick(value), {
        "aria-pressed": String(value === chosen),
        data: { value },
      }),
    ),
  );
}

export function field(text, control, has = {}) {
  return el("label", { class: "field", ...has }, el("span", {}, text), control);
}

export const select = (options, chosen, has = {}) => {
  const made = el(
    "select",
    has,
    options.map(([value, text]) => el("option", { value }, text)),
  );
  made.value = String(chosen);
  return made;
};

const MOST_ENTRIES = 200,
  OPEN_UP_TO = 8;

const isPlain = (value) => value === null || typeof value !== "object";

const plainText = (value) => (value === null ? "none" : String(value));

function leaves(value) {
  if (isPlain(value)) return 1;
  return Object.values(value).reduce((sum, inner) => sum + leaves(inner), 0);
}

/** An object of the manifest as names and values; what is large inside is folded. */
export function tree(value) {
  if (isPlain(value)) return code(plainText(value));
  const entries = Object.entries(value);
  if (entries.length === 0) return el("span", { class: "muted" }, "none");
  if (Array.isArray(value) && value.every(isPlain)) {
    return code(value.slice(0, MOST_ENTRIES).map(plainText).join(", "));
  }
  const rest = entries.length - MOST_ENTRIES;
  return el(
    "div",
    { class: "tree" },
    entries.slice(0, MOST_ENTRIES).map(([name, inner]) => branch(name, inner)),
    rest > 0 && el("p", { class: "muted" }, `${count(rest)} more`),
  );
}

function branch(name, value) {
  const flat = isPlain(value) || Object.keys(value).length === 0;
  if (flat || (Array.isArray(value) && value.every(isPlain))) {
    return el("p", { class: "leaf" }, el("span", {}, name), " ", tree(value));
  }
  const many = leaves(value);
  return el(
    "details",
    { open: many <= OPEN_UP_TO },
    el("summary", {}, name, el("span", { class: "muted" }, ` ${plural(many, "value")}`)),
    tree(value),
  );
}
