// A conversation as it was said.
//
// In: a VIEW and its turns.  Out: one bubble a turn, with what is trained marked.

import { el } from "./dom.js";
import { count, plural } from "./format.js";
import { runsOf, plainText } from "./tokens.js";

export function bubbles(view, turns) {
  const turn = (number) => turns.find((one, place) => (one.turn ?? place) === number);
  const runs = runsOf(
    view.turn,
    view.ids.length,
    (number) => turn(number)?.role ?? "before the first turn",
  );
  return el(
    "ol",
    { class: "bubbles", "aria-label": "Turns" },
    runs.map((run) => {
      const said = turn(run.run),
        whole = said ? said.stop - said.start : run.stop - run.start;
      const trained = said?.trained ?? 0;
      return el(
        "li",
        { class: `bubble ${["assistant", "user"].includes(run.name) ? run.name : "other"}` },
        el(
          "p",
          { class: "bubble-head" },
          el("b", {}, run.name),
          ` ${plural(whole, "token")}`,
          trained > 0 && el("span", { class: "row-trained" }, `${count(trained)} trained`),
        ),
        el(
          "div",
          { class: "bubble-text", dir: "auto" },
          plainText(view, { from: run.start, to: run.stop }),
        ),
      );
    }),
  );
}
