// Every token a box.
//
// In: a VIEW of the API and what its runs (documents, turns, pieces) are called.  Out: a list of
// boxes.
// Promise: one box a token, in order, whatever the text; one tab stop for all of them, arrows
// move; what is trained is underlined and tinted; a new run starts a group with its name.
// Not here: the panel that tells about a token (details.js), asking for more of them.

import { add, announce, el } from "./dom.js";
import { spoken, visible } from "./visible.js";

/** Runs of tokens with one number: [{start, stop, name, run}]. */
export function runsOf(numbers, length, nameOf) {
  if (numbers === null) return [{ start: 0, stop: length, name: null, run: 0 }];
  const runs = [];
  for (let at = 0; at < length; at += 1) {
    const last = runs[runs.length - 1];
    if (last && last.run === numbers[at]) last.stop = at + 1;
    else runs.push({ start: at, stop: at + 1, run: numbers[at], name: nameOf(numbers[at], at) });
  }
  return runs;
}

function box(view, at, cut) {
  const text = view.texts[at];
  const kinds = ["token"];
  if (view.trained?.[at]) kinds.push("trained");
  if (view.marker[at]) kinds.push("marker");
  if (text === "") kinds.push("inner");
  const made = el("span", {
    class: kinds.join(" "),
    role: "option",
    tabindex: "-1",
    "aria-selected": "false",
  });
  made.dataset.at = at;
  made.dataset.id = view.ids[at];
  if (text === "")
    add(made, el("span", { class: "space", "aria-label": "part of a character" }, "\u2026"));
  else if (/^[!-~]+$/.test(text)) made.textContent = text;
  else add(made, visible(text, { spaces: true }));
  if (cut.has(at)) add(made, el("span", { class: "control" }, "cut"));
  return made;
}

function group(view, run, cut, shade) {
  const made = document.createDocumentFragment();
  for (let at = run.start; at < run.stop; at += 1) {
    made.append(box(view, at, cut));
    if (view.texts[at].endsWith("\n")) made.append(document.createElement("br"));
  }
  if (run.name === null) return made;
  const kinds = `run ${run.waste ? "waste" : shade ? "odd" : "even"}`;
  return el(
    "div",
    { class: kinds, role: "group", "aria-label": run.name },
    el(
      "span",
      { class: "run-name", "aria-hidden": "true" },
      run.name,
      run.note && el("span", { class: "muted" }, ` ${run.note}`),
    ),
    el("div", { class: "run-tokens" }, made),
  );
}

/** The list. `tell(at, sticky)` is called when a token is pointed at or chosen. */
export function tokenList(view, runs, { name, tell, chosen = null }) {
  const cut = new Set(view.cut);
  const list = el(
    "div",
    { class: "tokens", role: "listbox", "aria-label": name, dir: "ltr" },
    runs.map((run, number) => group(view, run, cut, number % 2)),
  );
  const boxes = list.querySelectorAll(".token");
  if (boxes.length === 0) return list;
  let current = Math.min(Math.max(chosen ?? 0, 0), boxes.length - 1);
  boxes[current].tabIndex = 0;

  function choose(at, focus) {
    boxes[current].tabIndex = -1;
    boxes[current].setAttribute("aria-selected", "false");
    current = at;
    boxes[at].tabIndex = 0;
    boxes[at].setAttribute("aria-selected", "true");
    if (focus) boxes[at].focus();
    tell(at, true);
    announce(
      `Token ${view.start + at}, id ${view.ids[at]}, ${spoken(view.texts[at])}${view.trained?.[at] ? ", trained" : ""}`,
    );
  }
  const under = (event) => event.target.closest(".token");
  list.addEventListener(
    "pointerover",
    (event) => under(event) && tell(Number(under(event).dataset.at), false),
  );
  list.addEventListener("pointerleave", () => tell(null, false));
  list.addEventListener(
    "click",
    (event) => under(event) && choose(Number(under(event).dataset.at), true),
  );
  list.addEventListener(
    "focusin",
    (event) => under(event) && tell(Number(under(event).dataset.at), true),
  );
  list.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const next = moved(event.key, current, boxes);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    choose(next, true);
  });
  if (chosen !== null) {
    boxes[current].setAttribute("aria-selected", "true");
    queueMicrotask(() => tell(current, true));
  }
  return list;
}

function moved(key, at, boxes) {
  const last = boxes.length - 1;
  if (key === "ArrowRight") return Math.min(at + 1, last);
  if (key === "ArrowLeft") return Math.max(at - 1, 0);
  if (key === "Home") return 0;
  if (key === "End") return last;
  if (key === "Enter" || key === " ") return at;
  if (key === "ArrowDown") return beside(at, boxes, 1);
  if (key === "ArrowUp") return beside(at, boxes, -1);
  return null;
}

/** The token above or below, nearest to the same place on its line. */
function beside(at, boxes, step) {
  const here = boxes[at].getBoundingClientRect();
  const wanted = here.left + here.width / 2;
  let line = null,
    best = at,
    distance = Infinity;
  for (let next = at + step; next >= 0 && next < boxes.length; next += step) {
    const there = boxes[next].getBoundingClientRect();
    if (Math.abs(there.top - here.top) < here.height / 2) continue;
    if (line === null) line = there.top;
    if (Math.abs(there.top - line) > here.height / 2) break;
    const off = Math.abs(there.left + there.width / 2 - wanted);
    if (off < distance) {
      distance = off;
      best = next;
    }
  }
  return best;
}

/** The same tokens as running text: what is trained is marked, markers are chips. */
export function plainText(view, { from = 0, to = view.texts.length } = {}) {
  const made = document.createDocumentFragment();
  let at = from;
  while (at < to) {
    const trained = Boolean(view.trained?.[at]),
      marker = Boolean(view.marker[at]);
    let stop = at + 1;
    if (!marker)
      while (stop < to && Boolean(view.trained?.[stop]) === trained && !view.marker[stop])
        stop += 1;
    const text = visible(view.texts.slice(at, stop).join(""));
    const inner = marker ? el("span", { class: "marker-chip" }, text) : text;
    made.append(trained ? el("mark", { class: "trained-text" }, inner) : add(el("span"), inner));
    at = stop;
  }
  return made;
}

export const legend = (view, { trained = "trained", signs = true } = {}) =>
  el(
    "p",
    { class: "legend" },
    view.trained !== null && [
      el("span", { class: "token trained", "aria-hidden": "true" }, "word"),
      ` ${trained}`,
      el("span", { class: "token", "aria-hidden": "true" }, "word"),
      " not",
    ],
    el("span", { class: "token marker", "aria-hidden": "true" }, "<|eot|>"),
    " marker",
    signs && [
      el("span", { class: "space", "aria-hidden": "true" }, "\u00b7 \u21b5 \u2192"),
      " space, line, tab",
    ],
  );
