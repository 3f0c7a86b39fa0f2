// The keyboard.
//
// Promise: nothing happens while the user types in a field, or with a modifier; every key is
// listed in the help.

import { button, el, show } from "./dom.js";

const HELP = [
  [["j", "k"], "next and previous row of a list, document, or row of a plan"],
  [["\u2190", "\u2192", "\u2191", "\u2193"], "from token to token, when one has the focus"],
  [["Home", "End"], "first and last token"],
  [["Enter"], "open the row"],
  [["/"], "search"],
  [["g", "o"], "overview"],
  [["g", "d"], "documents"],
  [["g", "p"], "plans"],
  [["g", "m"], "mixture"],
  [["g", "s"], "step"],
  [["?"], "this help"],
  [["Esc"], "close, or leave a field"],
];
const GOES = { o: "overview", d: "documents", p: "plan", m: "mixture", s: "step" };

export function startKeys({ open, search }) {
  const dialog = document.getElementById("keys");
  show(
    dialog,
    el("h2", { id: "keys-title" }, "Keyboard"),
    el(
      "table",
      {},
      el(
        "thead",
        { class: "hidden" },
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "keys"),
          el("th", { scope: "col" }, "what they do"),
        ),
      ),
      el(
        "tbody",
        {},
        HELP.map(([keys, what]) =>
          el(
            "tr",
            {},
            el(
              "td",
              {},
              keys.map((key) => [el("kbd", {}, key), " "]),
            ),
            el("td", {}, what),
          ),
        ),
      ),
    ),
    button("Close", () => dialog.close(), { class: "main" }),
  );
  let walk = null,
    list = null,
    waiting = false;

  function handle(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || dialog.open) return false;
    const typing = event.target.closest?.("input, select, textarea");
    if (event.key === "Escape" && typing) {
      typing.blur();
      return true;
    }
    if (typing) return false;
    if (waiting) {
      waiting = false;
      if (event.key in GOES) {
        open(GOES[event.key]);
        return true;
      }
    }
    if (event.key === "g") {
      waiting = true;
      return true;
    }
    if (event.key === "?") {
      dialog.showModal();
      return true;
    }
    if (event.key === "/") {
      search();
      return true;
    }
    if (event.key === "j" || event.key === "ArrowDown") return step(1, event.key === "j");
    if (event.key === "k" || event.key === "ArrowUp") return step(-1, event.key === "k");
    return false;
  }

  function step(by, letter) {
    if (walk !== null && letter) {
      walk(by);
      return true;
    }
    const rows = list === null ? [] : [...list.querySelectorAll("a.row")];
    const at = rows.indexOf(document.activeElement);
    if (rows.length === 0 || (at < 0 && !letter)) return false;
    rows[
      at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1)
    ].focus();
    return true;
  }
  document.addEventListener("keydown", (event) => {
    if (handle(event)) event.preventDefault();
  });
  document.getElementById("help").addEventListener("click", () => dialog.showModal());
  return {
    /** What j and k do in this view. */
    walk: (call) => {
      walk = call;
    },
    list: (place) => {
      list = place;
    },
    forget: () => {
      walk = null;
      list = null;
    },
  };
}
