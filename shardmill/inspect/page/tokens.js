// Every token a box.
//
// In: a VIEW of the API and what its runs (documents, turns, pieces) are called.  Out: a list of
// boxes.
// Promise: one box a token, in order, whatever the text; one tab stop for all of them, arrows
// move; what is trained is underlined and tinted; a new run starts a group with its name, and its
// bar says how much of it is trained. A long system prompt is folded.
// Not here: the panel about one token (details.js), asking for more of them.

import { add, announce, button, el, freshId } from "./dom.js";
import { count } from "./format.js";
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

/** Whether "all", "some" or "none" of some tokens are trained; null when nothing says so. */
export function barOf(trained, total) {
  if (trained === null) return null;
  if (total === 0 || trained === 0) return "none";
  return trained < total ? "some" : "all";
}

const trainedIn = (view, from, to) =>
  view.trained === null ? null : view.trained.slice(from, to).reduce((sum, one) => sum + one, 0);

function group(view, run, cut) {
  const made = document.createDocumentFragment();
  for (let at = run.start; at < run.stop; at += 1) {
    made.append(box(view, at, cut));
    if (view.texts[at].endsWith("\n")) made.append(document.createElement("br"));
  }
  if (run.name === null) return made;
  const bar = run.bar ?? barOf(trainedIn(view, run.start, run.stop), run.stop - run.start);
  const said = `${run.name}${run.note ? ` ${run.note}` : ""}`;
  const tokens = el("div", { class: "run-tokens", role: "listbox", "aria-label": said }, made);
  return el(
    "div",
    { class: `run${run.waste ? " waste" : ""}`, data: bar && { bar } },
    el(
      "span",
      { class: "run-name", "aria-hidden": "true" },
      run.name,
      run.note && el("span", { class: "muted" }, ` ${run.note}`),
    ),
    run.folds ? fold(tokens, run.folds) : tokens,
  );
}

/** Tokens of a system prompt that is longer than this are folded. */
const LONG_PROMPT = 160;

/** What the button of a prompt that folds says; null when it does not. */
export function foldOf(role, tokens, whole) {
  if (role !== "system" || tokens <= LONG_PROMPT) return null;
  return `Show all ${count(tokens)} tokens${tokens < whole ? " on this page" : ""}`;
}

/** The first lines of `text`, and a button for the rest. The focus inside opens it. */
export function fold(text, words) {
  text.id = freshId("fold");
  text.classList.add("folded");
  const press = button(words, () => open(text.classList.contains("folded")), {
    class: "fold",
    "aria-expanded": "false",
    "aria-controls": text.id,
  });
  const open = (yes) => {
    text.classList.toggle("folded", !yes);
    press.setAttribute("aria-expanded", String(yes));
    press.textContent = yes ? "Show less" : words;
  };
  text.addEventListener("reveal", () => open(true));
  return [text, press];
}

/** Open the fold around a token, if the token is below its edge. */
function reveal(box) {
  const around = box.closest(".folded");
  if (around && box.offsetTop + box.offsetHeight > around.clientHeight)
    around.dispatchEvent(new Event("reveal"));
}

/** The list. `tell(at, sticky)` is called when a token is pointed at or chosen. */
export function tokenList(view, runs, { name, tell, chosen = null }) {
  const cut = new Set(view.cut);
  const parted = runs.some((run) => run.name !== null);
  const list = el(
    "div",
    { class: "tokens", role: parted ? "group" : "listbox", "aria-label": name, dir: "ltr" },
    runs.map((run) => group(view, run, cut)),
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
  list.addEventListener("focusin", (event) => {
    if (!under(event)) return;
    reveal(under(event));
    tell(Number(under(event).dataset.at), true);
  });
  list.addEventListener("keydown", (event) => {
    if (!under(event) || event.ctrlKey || event.altKey || event.metaKey) return;
    const next = moved(event.key, current, boxes);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    choose(next, true);
  });
  if (chosen !== null) {
    boxes[current].setAttribute("aria-selected", "true");
    boxes[current].closest(".folded")?.dispatchEvent(new Event("reveal")); // it has no place yet
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

const swatch = (bar) => [
  el("span", { class: "swatch-bar", "aria-hidden": "true", data: { bar } }),
  ` ${bar} `,
];

/** What colours and signs mean. `bars`: there are bars for parts, too. */
export const legend = (view, { trained = "trained", signs = true, bars = false } = {}) =>
  el(
    "p",
    { class: "legend" },
    view.trained !== null && [
      el("span", { class: "token trained", "aria-hidden": "true" }, "word"),
      ` ${trained}`,
      el("span", { class: "token", "aria-hidden": "true" }, "word"),
      " not",
    ],
    view.trained !== null &&
      bars && [
        el("span", { class: "legend-bars" }, "bars:", ["all", "some", "none"].map(swatch), trained),
      ],
    el("span", { class: "token marker", "aria-hidden": "true" }, "<|eot|>"),
    " marker",
    signs && [
      el("span", { class: "space", "aria-hidden": "true" }, "\u00b7 \u21b5 \u2192"),
      " space, line, tab",
    ],
  );
