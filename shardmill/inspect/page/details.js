// The panel about one token.
//
// In: VIEWs, the place of a token in one, where that is in its split.  Out: an element, and
// `teller`s.
// Promise: pointing shows, choosing keeps; the question where a token comes from is asked only on
// request.

import { get } from "./api.js";
import { button, el, show } from "./dom.js";
import { count, range } from "./format.js";
import { facts, into } from "./parts.js";
import { codePoint, visible } from "./visible.js";

/** One panel for any number of views. `teller(view, about)` gives the `tell` of a list of tokens;
 * `about(at)` is {position, store, split, more}: where the token is, and further facts. */
export function detailsPanel() {
  const body = el("div", { class: "details-body" });
  const panel = el("aside", { class: "details", "aria-label": "About the token" }, body);
  let kept = null;

  const draw = (shown) =>
    show(
      body,
      shown === null
        ? el(
            "p",
            { class: "muted" },
            "Point at a token, or go into the list with Tab and move with the arrow keys.",
          )
        : card(shown.view, shown.at, shown.about(shown.at), shown === kept),
    );

  const teller = (view, about) => (at, sticky) => {
    const found =
      at === null ? null : kept?.view === view && kept.at === at ? kept : { view, at, about };
    if (sticky) kept = found;
    draw(found ?? kept);
  };
  draw(null);
  return { panel, teller };
}

function card(view, at, { position, store, split, more }, chosen) {
  const found = el("div", { class: "blame", "aria-live": "polite" });
  const yes = view.trained === null ? null : view.trained[at] ? "yes" : "no";
  const text = view.texts[at];
  return [
    el(
      "p",
      { class: `details-text${view.trained?.[at] ? " trained" : ""}` },
      text === ""
        ? el("span", { class: "muted" }, "part of a character")
        : visible(text, { spaces: true }),
    ),
    facts([
      ["id", el("code", { class: "id" }, String(view.ids[at]))],
      ["offset", count(view.start + at)],
      ["position", position === null ? null : count(position)],
      ["trained", yes],
      ["kind", view.marker[at] ? "marker" : "text"],
      ["code points", /^[ -~]*$/.test(text) ? null : points([...text])],
      ...more,
    ]),
    chosen &&
      position !== null &&
      store !== null &&
      button("Where does it come from?", () => into(found, () => blame(store, split, position)), {
        class: "wide",
      }),
    found,
  ];
}

/** Of a text that holds more than plain letters. */
const points = (characters) =>
  characters.slice(0, 8).map(codePoint).join(" ") + (characters.length > 8 ? " \u2026" : "");

async function blame(store, split, token) {
  const found = await get(`stores/${store}/blame`, { split, token });
  return [
    facts([
      ["source", found.source],
      ["file", found.file && el("code", {}, found.file)],
      ["row", found.row === null || found.row === undefined ? null : count(found.row)],
      [
        "characters",
        found.from === null || found.from === undefined ? null : range(found.from, found.to),
      ],
    ]),
    el(
      "p",
      { class: "quote" },
      visible(found.text_before ?? ""),
      el("mark", {}, visible(found.text ?? "")),
      visible(found.text_after ?? ""),
    ),
    found.note && el("p", { class: "muted" }, found.note),
  ];
}
