// A pack plan: how full its rows are, and what lies in them.
//
// In: /plans.  Out: the view.
// Promise: a row's bar is in proportion to its places; pieces and waste differ by more than colour.

import { get } from "./api.js";
import { histogram } from "./charts.js";
import { detailsPanel } from "./details.js";
import { button, el, link, svg } from "./dom.js";
import { count, percent, plural } from "./format.js";
import { choice, code, empty, into, pager } from "./parts.js";
import { make } from "./route.js";
import { legend, runsOf, tokenList } from "./tokens.js";

const LIMIT = 40;

export async function plans(place, { route, go, keys }) {
  await into(
    place,
    async () => {
      const store = await get(`stores/${route.store}`);
      const usable = store.plans.filter((plan) => !plan.error);
      if (usable.length === 0) return none(store);
      const chosen =
        route.rest === null ? usable[0] : usable.find((plan) => plan.name === route.rest);
      if (chosen === undefined)
        throw new Error(
          `Plan ${route.rest}: the store has ${usable.map((plan) => plan.name).join(", ")}; choose one of them.`,
        );
      const at = { ...route, rest: chosen.name };
      const base = `stores/${route.store}/plans/${encodeURIComponent(chosen.name)}`;
      const pick = choice(
        "Plan",
        usable.map((plan) => [plan.name, plan.name]),
        chosen.name,
        (name) => go({ ...route, rest: name, query: {} }),
      );
      const title = el("div", { class: "title" }, el("h1", {}, "Plan"), pick);
      if (route.query.row !== undefined) return [title, await oneRow(at, chosen, base, go, keys)];
      const list = el("div", { class: "steady", id: "list" }),
        glance = el("div");
      into(glance, () => summary(chosen, base));
      into(list, () => rows(at, base, go));
      keys.list(list);
      return [title, glance, list];
    },
    "Plan",
  );
}

function none(store) {
  return [
    el("div", { class: "title" }, el("h1", {}, "Plans")),
    store.kind === "chat"
      ? empty("No plan yet.", [
          "A plan decides which conversations share a row. Make one: ",
          code(`shardmill pack ${store.path} --seq-len 2048`),
        ])
      : empty(
          "Plans are for conversations.",
          "Text is read in windows of any length; look at a step to see them.",
        ),
  ];
}

async function summary(plan, base) {
  const found = await get(base);
  return el(
    "div",
    { class: "search-and-lengths" },
    el(
      "div",
      { class: "glance" },
      el(
        "ul",
        { class: "figures" },
        [
          [percent(found.utilisation, 2), "full"],
          [count(found.rows), "rows"],
          [count(plan.pieces), "pieces"],
          [count(found.seq_len), "seq_len"],
          [found.split, "split"],
        ].map(([value, name]) => el("li", {}, el("b", {}, value), " ", el("span", {}, name))),
      ),
      el(
        "p",
        { class: "hint" },
        `A row has ${count(found.seq_len + 1)} places: ${count(found.seq_len)} inputs, and the labels one place on. What no conversation fills is padding and is never trained.`,
        found.looked_at < found.rows &&
          ` ${count(found.looked_at)} of ${count(found.rows)} rows were looked at.`,
      ),
    ),
    el(
      "div",
      { class: "lengths" },
      histogram(found.histogram, {
        title: "How full rows are",
        unit: "used places of a row",
        what: "rows",
        height: 168,
      }),
    ),
  );
}

async function rows(route, base, go) {
  const sort = route.query.sort === "waste" ? "waste" : "row",
    start = Number(route.query.start) || 0;
  const { total, rows: found } = await get(`${base}/rows`, { sort, start, limit: LIMIT });
  const to = (more) => go({ ...route, query: { sort: sort === "waste" ? sort : null, ...more } });
  return [
    el(
      "div",
      { class: "bar-row" },
      el("h2", {}, "Rows"),
      choice(
        "Sort by",
        [
          ["row", "in order"],
          ["waste", "emptiest first"],
        ],
        sort,
        (next) => to({ sort: next === "waste" ? next : null }),
      ),
      el(
        "p",
        { class: "legend" },
        el("span", { class: "swatch-piece", "aria-hidden": "true" }),
        " piece",
        el("span", { class: "swatch-waste", "aria-hidden": "true" }),
        " waste",
      ),
    ),
    el(
      "ol",
      { class: "rows packed", "aria-label": "Rows" },
      found.map((row) =>
        el(
          "li",
          {},
          link(
            [
              el("span", { class: "row-number" }, count(row.row)),
              bar(row),
              el(
                "span",
                { class: "row-facts" },
                `${percent(row.used / row.room, 0)}, ${plural(row.pieces.length, "piece")}`,
              ),
            ],
            make({ ...route, query: { ...route.query, row: row.row } }),
            { class: "row" },
          ),
        ),
      ),
    ),
    pager({ start, limit: LIMIT, total, what: "rows", go: (next) => to({ start: next || null }) }),
  ];
}

/** One row as a bar, a thousand units wide. */
function bar({ row, used, room, pieces }, height = 14) {
  const unit = 1000 / room;
  return svg(
    "svg",
    {
      class: "packed-bar",
      role: "img",
      viewBox: `0 0 1000 ${height}`,
      preserveAspectRatio: "none",
      "aria-label": `row ${row}: ${count(used)} of ${count(room)} places used by ${plural(pieces.length, "piece")}`,
    },
    svg("rect", { class: "waste", width: 1000, height }),
    pieces.map((piece, at) =>
      svg(
        "rect",
        {
          class: at % 2 ? "piece odd" : "piece",
          x: piece.place * unit,
          width: Math.max(1, piece.length * unit - 1.5),
          height,
        },
        svg(
          "title",
          {},
          `example ${count(piece.example)}: ${count(piece.length)} tokens at ${count(piece.place)}`,
        ),
      ),
    ),
  );
}

async function oneRow(route, plan, base, go, keys) {
  const number = Number(route.query.row),
    found = await get(`${base}/rows/${number}`),
    { view } = found;
  const walk = (step) => {
    const next = number + step;
    if (next >= 0 && next < plan.rows) go({ ...route, query: { ...route.query, row: next } });
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
      link("All rows", make({ ...route, query: { ...route.query, row: null } })),
      el(
        "p",
        { class: "path" },
        `${count(found.used)} of ${count(found.room)} places used, ${plural(found.pieces.length, "piece")}, ${count(found.room - found.used)} wasted`,
      ),
    ),
    view.note && el("p", { class: "note" }, view.note),
    el("div", { class: "row-bar" }, bar(found, 18)),
    legend(view),
    el(
      "div",
      { class: "with-details" },
      tokenList(view, runs, { name: `Tokens of row ${number}`, tell }),
      panel,
    ),
  ];
}

const exampleAt = (route, plan, example) =>
  make({
    store: route.store,
    view: "document",
    rest: String(example),
    query: { split: plan.split },
  });
