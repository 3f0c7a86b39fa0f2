// One row of a plan, token by token.
//
// In: /plans/NAME/rows/N.  Out: a part of the view.
// Promise: every place of the row is shown, the padding too, a page at a time.

import { get } from "./api.js";
import { bar } from "./bars.js";
import { detailsPanel } from "./details.js";
import { button, el, link } from "./dom.js";
import { count, plural } from "./format.js";
import { pager } from "./parts.js";
import { make } from "./route.js";
import { legend, runsOf, tokenList } from "./tokens.js";

const LIMIT = 4000;

export async function oneRow(route, plan, base, go, keys) {
  const number = Number(route.query.row),
    start = Number(route.query.from) || 0,
    found = await get(`${base}/rows/${number}`, { start, limit: LIMIT }),
    { view } = found;
  const walk = (step) => {
    const next = number + step;
    if (next >= 0 && next < plan.rows)
      go({ ...route, query: { ...route.query, row: next, from: null } });
  };
  keys.walk(walk);
  const example = (piece) => found.pieces[piece]?.example;
  const { panel, teller } = detailsPanel();
  const tell = teller(view, (at) => ({
    position: null,
    store: null,
    split: null,
    more: [
      [
        "example",
        example(view.piece[at]) === undefined
          ? "padding"
          : link(count(example(view.piece[at])), exampleAt(route, plan, example(view.piece[at]))),
      ],
    ],
  }));
  const runs = runsOf(view.piece, view.ids.length, (piece) =>
    example(piece) === undefined ? "padding" : `example ${count(example(piece))}`,
  );
  for (const run of runs) {
    run.waste = example(run.run) === undefined;
    run.note = plural(run.stop - run.start, "token");
  }
  return [
    el(
      "div",
      { class: "title" },
      el("h2", {}, `Row ${count(number)}`),
      el("span", { class: "muted" }, `of ${count(plan.rows)}`),
      el(
        "div",
        { class: "choice" },
        button("\u2190 Previous", () => walk(-1), { disabled: number === 0 }),
        button("Next \u2192", () => walk(1), { disabled: number + 1 >= plan.rows }),
      ),
      link("All rows", make({ ...route, query: { ...route.query, row: null, from: null } })),
      el(
        "p",
        { class: "path" },
        `${count(found.used)} of ${count(found.room)} places used, ${plural(found.pieces.length, "piece")}, ${count(found.room - found.used)} wasted`,
      ),
    ),
    view.note && el("p", { class: "note" }, view.note),
    el("div", { class: "row-bar" }, bar(found, 18)),
    legend(view, { bars: true }),
    el(
      "div",
      { class: "with-details" },
      tokenList(view, runs, { name: `Tokens of row ${number}`, tell }),
      panel,
    ),
    (start > 0 || view.stop < found.room) &&
      pager({
        start,
        limit: LIMIT,
        stop: view.stop,
        total: found.room,
        what: "places",
        go: (from) => go({ ...route, query: { ...route.query, from: from || null } }),
      }),
  ];
}

const exampleAt = (route, plan, example) =>
  make({
    store: route.store,
    view: "document",
    rest: String(example),
    query: { split: plan.split },
  });
