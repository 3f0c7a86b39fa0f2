// What a rank trains on at a step.
//
// In: numbers of a training.  Out: the exact batch, row by row.
// Not here: one row of the batch (step-rows.js).
// Promise: asked for only with numbers that were typed or are in the address; a part of a large
// batch at a time; rows further down are made when they are opened.

import { get } from "./api.js";
import { detailsPanel } from "./details.js";
import { announce, el, show } from "./dom.js";
import { count, plural, range } from "./format.js";
import { empty, field, into, pager, select } from "./parts.js";
import { stepRow } from "./step-rows.js";
import { legend } from "./tokens.js";

const ROWS = 16,
  OPEN = 2;
const NUMBERS = [
  ["step", "Step", 0, 0],
  ["rank", "Rank", 0, 0],
  ["world", "World", 1, 1],
  ["batch_size", "Batch size", 1, 4],
  ["seq_len", "seq_len", 1, 128],
  ["seed", "Seed", 0, 0],
];
const PASSED = [
  "split",
  "plan",
  "seq_len",
  "batch_size",
  "world",
  "rank",
  "step",
  "seed",
  "shuffle",
  "documents",
];

export async function step(place, { route, go, all }) {
  await into(
    place,
    async () => {
      const store = route.store === null ? null : await get(`stores/${route.store}`);
      const result = el("div", { class: "steady", id: "batch", "aria-live": "off" });
      if (route.query.step !== undefined) into(result, () => batch(route, go, all));
      else
        show(
          result,
          empty(
            "Say which step.",
            "The same numbers as in training give the same rows, to the token: seed, batch size, world and seq_len decide the order.",
          ),
        );
      return [
        el(
          "div",
          { class: "title" },
          el("h1", {}, "Step"),
          el("span", { class: "muted" }, "the exact batch of a rank, from the numbers alone"),
        ),
        form(route, store, all, go),
        result,
      ];
    },
    "Step",
  );
}

function form(route, store, all, go) {
  const places = [
    ...(all.mixture ? [["", "the mixture"]] : []),
    ...all.stores.filter((one) => !one.error).map((one) => [String(one.store), one.name]),
  ];
  const where = select(places, store === null ? "" : String(store.store));
  where.addEventListener("change", () =>
    go({ store: where.value === "" ? null : Number(where.value), view: "step" }),
  );
  const usable = store?.plans.filter((plan) => !plan.error) ?? [];
  const plan =
    usable.find((one) => one.name === route.query.plan) ??
    (store?.kind === "chat" ? usable[0] : undefined);
  const send = (event) => {
    event.preventDefault();
    go({ ...route, query: Object.fromEntries(new FormData(event.target)) });
  };
  const usual = (name, value) =>
    route.query[name] ?? (name === "seq_len" && plan ? plan.seq_len : value);
  return el(
    "form",
    { class: "form", "aria-label": "Which batch", on: { submit: send } },
    field("Data", where),
    store &&
      store.kind !== "chat" &&
      field(
        "Split",
        select(
          store.splits.map((one) => [one.name, one.name]),
          route.query.split ?? store.splits[0]?.name,
          { name: "split" },
        ),
      ),
    store &&
      store.kind === "chat" &&
      field(
        "Plan",
        select(
          usable.length
            ? usable.map((one) => [one.name, one.name])
            : [["", "none: shardmill pack"]],
          plan?.name ?? "",
          { name: "plan" },
        ),
      ),
    NUMBERS.map(([name, text, least, value]) =>
      field(
        text,
        el("input", {
          type: "number",
          name,
          min: least,
          value: usual(name, value),
          required: true,
        }),
      ),
    ),
    field(
      "Shuffle",
      select(
        [
          ...(store ? [] : [["", "as configured"]]),
          ["global", "global"],
          ["block", "block"],
          ["none", "none"],
        ],
        route.query.shuffle ?? (store ? "global" : ""),
        { name: "shuffle" },
      ),
    ),
    store?.kind !== "chat" &&
      field(
        "Documents",
        select(
          [...(store ? [] : [["", "as configured"]]), ["0", "run on"], ["1", "kept apart"]],
          route.query.documents ?? (store ? "0" : ""),
          { name: "documents" },
        ),
      ),
    el("button", { type: "submit", class: "main" }, "Show the batch"),
  );
}

async function batch(route, go, all) {
  const asked = Object.fromEntries(
    PASSED.filter((name) => route.query[name]).map((name) => [name, route.query[name]]),
  );
  const start = Number(route.query.start) || 0;
  const read = (more) => get("step", { ...asked, store: route.store, ...more });
  const part = async (row, from) => (await read({ start: row, limit: 1, from })).rows[0];
  const found = await read({ start, limit: ROWS });
  const { panel, teller } = detailsPanel();
  announce(`Step ${route.query.step}: ${plural(found.rows.length, "row")}`);
  return [
    el(
      "div",
      { class: "bar-row" },
      el("h2", {}, `Samples ${range(found.samples, found.stop)}`),
      el(
        "span",
        { class: "muted" },
        `of all ranks; rank ${count(found.rank)} of ${count(found.world)} has ${plural(found.batch_size, "row")}`,
      ),
      found.rows.length > 0 && legend(found.rows[0].view, { trained: "labels", bars: true }),
    ),
    el(
      "div",
      { class: "with-details" },
      el(
        "div",
        { class: "cards" },
        found.rows.map((row, at) =>
          stepRow(row, at < OPEN, {
            all,
            teller,
            read: (from) => part(start + at, from),
            length: found.seq_len + 1,
          }),
        ),
      ),
      panel,
    ),
    (start > 0 || found.rows.length < found.batch_size) &&
      pager({
        start,
        limit: ROWS,
        stop: start + found.rows.length,
        total: found.batch_size,
        what: "rows of this rank",
        go: (next) => go({ ...route, query: { ...route.query, start: next || null } }),
      }),
  ];
}
