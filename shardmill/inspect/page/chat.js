// A conversation as it was said.
//
// In: a VIEW and its turns.  Out: one bubble a turn, with what is trained marked.

import { el } from "./dom.js";
import { count, plural } from "./format.js";
import { barOf, fold, foldOf, plainText, runsOf } from "./tokens.js";

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
      const trained = said?.trained ?? 0,
        folds = foldOf(said?.role, run.stop - run.start, whole);
      const text = el(
        "div",
        { class: "bubble-text", dir: "auto" },
        plainText(view, { from: run.start, to: run.stop }),
      );
      return el(
        "li",
        {
          class: `bubble ${["assistant", "user"].includes(run.name) ? run.name : "other"}`,
          data: { bar: barOf(trained, whole) },
        },
        el(
          "p",
          { class: "bubble-head" },
          el("b", {}, run.name),
          ` ${plural(whole, "token")}`,
          trained > 0 && el("span", { class: "row-trained" }, `${count(trained)} trained`),
        ),
        folds ? fold(text, folds) : text,
      );
    }),
  );
}
