// The first view: what a store is, and where everything went.
//
// In: /api/stores/S.  Out: the view.
// Not here: the list of shards (shards.js), documents.

import { get } from "./api.js";
import { button, el, link, section } from "./dom.js";
import { bytes, count, percent, plural, short } from "./format.js";
import { flow } from "./flow.js";
import { documentFlow, tokenFlow } from "./ledger.js";
import { code, empty, facts, into, table, tree } from "./parts.js";
import { make } from "./route.js";
import { shardSection } from "./shards.js";

export async function overview(place, { route }) {
  await into(
    place,
    async () => {
      const store = await get(`stores/${route.store}`);
      return [
        head(store),
        figures(store),
        el(
          "div",
          { class: "two" },
          section(
            `${unitOf(store, 2)} read`,
            flow({
              title: "Where every input went",
              unit: unitOf(store, 2).toLowerCase(),
              ...documentFlow(store),
            }),
          ),
          section(
            "Tokens made",
            flow({ title: "Where every token went", unit: "tokens", ...tokenFlow(store) }),
          ),
        ),
        section("Splits", splits(store)),
        shardSection(store),
        section("Pack plans", plans(store)),
        el(
          "div",
          { class: "two" },
          section("Tokenizer", tokenizer(store)),
          section("Left out and repaired", leftOut(store)),
        ),
        section("Made from", sources(store)),
        section(
          "How it was built",
          el(
            "div",
            { class: "two" },
            el("div", {}, el("h3", {}, "Options"), tree(store.options)),
            el("div", {}, el("h3", {}, "Made by"), tree(store.produced_by)),
          ),
        ),
      ];
    },
    "Overview",
  );
}

const unitOf = (store, number) =>
  (store.kind === "chat" ? ["Conversation", "Conversations"] : ["Document", "Documents"])[
    number > 1 ? 1 : 0
  ];

function head(store) {
  return el(
    "div",
    { class: "title" },
    el("h1", {}, store.name),
    el("span", { class: "chip" }, store.kind === "chat" ? "conversations" : "text"),
    el(
      "p",
      { class: "path" },
      code(store.path),
      " fingerprint ",
      el("code", { title: store.fingerprint }, short(store.fingerprint)),
    ),
  );
}

function figures(store) {
  const sum = (of) => store.splits.reduce((total, split) => total + of(split), 0);
  const tokens = sum((split) => split.tokens);
  const trained = store.kind === "chat" ? sum((split) => split.trained_tokens ?? 0) : null;
  return el(
    "ul",
    { class: "figures" },
    [
      [count(tokens), "tokens"],
      [count(sum((split) => split.documents)), unitOf(store, 2).toLowerCase()],
      trained !== null && [tokens ? percent(trained / tokens) : "-", "trained"],
      [bytes(sum((split) => split.bytes)), `as ${store.dtype}`],
      [count(sum((split) => split.shards)), "shards"],
      [count(store.vocab_size), "vocabulary"],
    ]
      .filter(Boolean)
      .map(([value, name]) => el("li", {}, el("b", {}, value), " ", el("span", {}, name))),
  );
}

function splits(store) {
  const open = (split) =>
    link(split.name, make({ store: store.store, view: "documents", query: { split: split.name } }));
  const chat = store.kind === "chat";
  return table(
    [
      { name: "split", head: true, cell: open },
      { name: "tokens", number: true, cell: (split) => count(split.tokens) },
      {
        name: unitOf(store, 2).toLowerCase(),
        number: true,
        cell: (split) => count(split.documents),
      },
      chat && { name: "turns", number: true, cell: (split) => count(split.turns) },
      chat && {
        name: "trained",
        number: true,
        cell: (split) =>
          split.tokens
            ? `${count(split.trained_tokens)} (${percent(split.trained_tokens / split.tokens)})`
            : "0",
      },
      {
        name: "mean length",
        number: true,
        cell: (split) =>
          split.documents ? count(Math.round(split.tokens / split.documents)) : "-",
      },
      { name: "shards", number: true, cell: (split) => count(split.shards) },
      { name: "size", number: true, cell: (split) => bytes(split.bytes) },
    ].filter(Boolean),
    store.splits,
    { caption: "Splits of the store" },
  );
}

function plans(store) {
  if (store.plans.length === 0) {
    return store.kind === "chat"
      ? empty("No plan yet.", [
          "Decide which conversations share a row: ",
          code(`shardmill pack ${store.path} --seq-len 2048`),
        ])
      : empty(
          "Plans are for conversations.",
          "Text is read in windows of any length, without one.",
        );
  }
  return table(
    [
      {
        name: "plan",
        head: true,
        cell: (plan) =>
          link(plan.name, make({ store: store.store, view: "plan", rest: plan.name })),
      },
      {
        name: "split",
        cell: (plan) => (plan.error ? el("span", { class: "bad" }, plan.error) : plan.split),
      },
      { name: "seq_len", number: true, cell: (plan) => count(plan.seq_len) },
      { name: "rows", number: true, cell: (plan) => count(plan.rows) },
      { name: "pieces", number: true, cell: (plan) => count(plan.pieces) },
      {
        name: "full",
        number: true,
        cell: (plan) => (plan.error ? "-" : percent(plan.utilisation, 2)),
      },
    ],
    store.plans,
    { caption: "Pack plans" },
  );
}

function tokenizer(store) {
  const { name, open, why } = store.tokenizer;
  const specials = Object.entries(store.special_token_ids ?? {});
  return [
    facts([
      ["name", name ?? "not named"],
      ["text", open ? "shown" : "ids are shown"],
      [
        "fingerprint",
        store.tokenizer.fingerprint &&
          el("code", { title: store.tokenizer.fingerprint }, short(store.tokenizer.fingerprint)),
      ],
      ["vocabulary", count(store.vocab_size)],
    ]),
    !open && why && el("p", { class: "note" }, why),
    specials.length > 0 &&
      el(
        "ul",
        { class: "chips", "aria-label": "Special tokens" },
        specials.map(([text, id]) => el("li", {}, code(text), ` ${id}`)),
      ),
  ];
}

function leftOut(store) {
  const repaired = Object.entries(store.repaired ?? {});
  const gone = Object.entries(store.ledger.documents.dropped);
  const rows = [
    ...gone.map(([reason, rows]) => ({ what: "dropped", reason, rows })),
    ...repaired.map(([reason, rows]) => ({ what: "repaired", reason, rows })),
    ...(store.exclusions
      ? [
          {
            what: "excluded",
            reason:
              store.exclusions.error ??
              `${plural(store.exclusions.tokens, "token")}, list ${short(store.exclusions.sha256)}`,
            rows: store.exclusions.documents,
          },
        ]
      : []),
  ];
  if (rows.length === 0) return empty("Nothing was dropped, repaired or excluded.");
  return table(
    [
      { name: "what", head: true, cell: (row) => row.what },
      { name: "why", cell: (row) => row.reason.replaceAll("_", " ") },
      { name: "rows", number: true, cell: (row) => count(row.rows) },
    ],
    rows,
    { caption: "Left out and repaired" },
  );
}

const SHOWN_SOURCES = 20;

function sources(store) {
  if (store.sources.length === 0) return empty("The store does not say.");
  const list = el("div", { class: "cards" });
  const more = (from) => {
    list.append(
      ...store.sources
        .slice(from, from + SHOWN_SOURCES)
        .map((source, at) =>
          el(
            "details",
            { class: "card", open: store.sources.length === 1 },
            el("summary", {}, String(source.name ?? source.kind ?? `source ${from + at}`)),
            tree(source),
          ),
        ),
    );
    if (from + SHOWN_SOURCES < store.sources.length) {
      list.append(
        button(`${count(store.sources.length - from - SHOWN_SOURCES)} more`, (event) => {
          event.target.remove();
          more(from + SHOWN_SOURCES);
        }),
      );
    }
  };
  more(0);
  return list;
}
