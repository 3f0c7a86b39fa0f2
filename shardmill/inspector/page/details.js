// The panel about one token.
//
// In: a VIEW, the place of a token in it, where the view lies in its split.  Out: an element and `tell`.
// Promise: pointing shows, choosing keeps; the question where a token comes from is asked only on request.

import { get } from "./api.js";
import { button, el, show } from "./dom.js";
import { count, range } from "./format.js";
import { facts, into } from "./parts.js";
import { visible } from "./visible.js";

/** `about(at)` gives {position, store, split, more}: where the token lies, and further facts. */
export function detailsPanel(view, about) {
  const body = el("div", { class: "details-body" });
  const panel = el("aside", { class: "details", "aria-label": "About the token" }, body);
  let kept = null;

  function tell(at, sticky) {
    if (sticky) kept = at;
    const shown = at ?? kept;
    if (shown === null) {
      show(body, el("p", { class: "muted" }, "Point at a token, or go into the list with Tab and move with the arrow keys."));
      return;
    }
    show(body, card(view, shown, about(shown), shown === kept));
  }
  tell(null, false);
  return { panel, tell };
}

function card(view, at, { position, store, split, more }, chosen) {
  const found = el("div", { class: "blame", "aria-live": "polite" });
  const yes = view.trained === null ? null : view.trained[at] ? "yes" : "no";
  const text = view.texts[at];
  return [
    el("p", { class: `details-text${view.trained?.[at] ? " trained" : ""}` },
      text === "" ? el("span", { class: "muted" }, "part of a character") : visible(text, { spaces: true })),
    facts([
      ["id", el("code", { class: "id" }, String(view.ids[at]))],
      ["offset", count(view.start + at)],
      ["position", position === null ? null : count(position)],
      ["trained", yes],
      ["kind", view.marker[at] ? "marker" : "text"],
      ["characters", text === "" ? null : [...text].map((one) => `U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`).slice(0, 6).join(" ") + ([...text].length > 6 ? " \u2026" : "")],
      ...more,
    ]),
    chosen && position !== null && store !== null &&
      button("Where does it come from?", () => into(found, () => blame(store, split, position)), { class: "wide" }),
    found,
  ];
}

async function blame(store, split, token) {
  const found = await get(`stores/${store}/blame`, { split, token });
  return [
    facts([
      ["source", found.source], ["file", found.file && el("code", {}, found.file)],
      ["row", found.row === null || found.row === undefined ? null : count(found.row)],
      ["characters", found.from === null || found.from === undefined ? null : range(found.from, found.to)],
    ]),
    el("p", { class: "quote" }, visible(found.text_before ?? ""), el("mark", {}, visible(found.text ?? "")), visible(found.text_after ?? "")),
    found.note && el("p", { class: "muted" }, found.note),
  ];
}
