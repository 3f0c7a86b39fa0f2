// A pack plan: how full its rows are, and what is in them.
//
// In: /plans.  Out: the view.
// Not here: one row (view-row.js), its bar (bars.js).

import { get } from "./api.js";
import { bar } from "./bars.js";
import { histogram } from "./charts.js";
import { el, link } from "./dom.js";
import { count, percent, plural } from "./format.js";
import { choice, code, empty, into, missing, pager } from "./parts.js";
import { make } from "./route.js";
import { oneRow } from "./view-row.js";

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
        throw missing(
          `There is no plan ${route.rest}; the store has ${usable.map((plan) => plan.name).join(", ")}.`,
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
