// Documents of a split: search, lengths, a list to walk through.
//
// In: /documents, /histogram, /search.  Out: the view.
// Promise: a search continues only when asked to, and says how far it looked; the list is one tab
// stop a row.
// Not here: one document (view-document.js).

import { get } from "./api.js";
import { announce, button, el, link, show } from "./dom.js";
import { histogram } from "./charts.js";
import { count, plural } from "./format.js";
import { choice, empty, field, into, missing, pager, select } from "./parts.js";
import { make } from "./route.js";
import { oneLine } from "./visible.js";

const LIMIT = 50;
const KINDS = [
  ["text", "text"],
  ["id", "id"],
  ["source", "source"],
];

export async function documents(place, { route, go, keys }) {
  await into(
    place,
    async () => {
      const store = await get(`stores/${route.store}`);
      const query = { split: store.splits[0]?.name, ...route.query };
      if (query.split === undefined) return empty("The store has no split.");
      const to = (more) => go({ ...route, query: { ...query, ...more } });
      const list = el("div", { class: "steady", id: "list" }),
        lengths = el("div", { class: "lengths" });
      const name = store.kind === "chat" ? "Conversations" : "Documents";
      const glance = el("div");
      into(lengths, () => lengthChart(route.store, query.split, name.toLowerCase(), glance));
      into(list, () => (query.q ? found(route.store, query) : page(route.store, query, to)));
      keys.list(list);
      return [
        el(
          "div",
          { class: "title" },
          el("h1", {}, name),
          el("span", { class: "muted" }, store.name),
          choice(
            "Split",
            store.splits.map((one) => [one.name, one.name]),
            query.split,
            (split) => go({ ...route, query: { split } }),
          ),
        ),
        el(
          "div",
          { class: "search-and-lengths" },
          el("div", { class: "finders" }, searchBox(query, to), glance),
          lengths,
        ),
        list,
      ];
    },
    "Documents",
  );
}

function searchBox(query, to) {
  const words = el("input", {
    type: "search",
    id: "search",
    value: query.q ?? "",
    placeholder: "Words as they stand in the text",
    spellcheck: "false",
    autocomplete: "off",
  });
  const kind = select(KINDS, query.kind ?? "text", { id: "search-kind" });
  const number = el("input", { type: "number", min: "0", id: "jump", inputmode: "numeric" });
  const send = (event) => {
    event.preventDefault();
    to({ q: words.value, kind: words.value ? kind.value : null, start: null });
  };
  const jump = (event) => {
    event.preventDefault();
    if (number.value !== "") to({ start: number.value, q: null, kind: null });
  };
  return el(
    "div",
    { class: "finders" },
    el(
      "form",
      { role: "search", class: "form", on: { submit: send } },
      field("Search for", words, { class: "field grow" }),
      field("in", kind),
      el("button", { type: "submit", class: "main" }, "Search"),
    ),
    el(
      "form",
      { class: "form", "aria-label": "Jump to a document", on: { submit: jump } },
      field("From number", number),
      el("button", { type: "submit" }, "Jump"),
    ),
    el(
      "p",
      { class: "hint" },
      el("kbd", {}, "/"),
      " search ",
      el("kbd", {}, "j"),
      " ",
      el("kbd", {}, "k"),
      " walk ",
      el("kbd", {}, "Enter"),
      " open",
    ),
  );
}

async function lengthChart(store, split, what, glance) {
  const made = await get(`stores/${store}/histogram`, { split });
  if (made.looked_at === 0) return null;
  const figures = [
    [made.documents, what],
    [made.shortest, "shortest"],
    [made.median, "median"],
    [Math.round(made.mean), "mean"],
    [made.longest, "longest"],
  ];
  show(
    glance,
    el(
      "ul",
      { class: "figures" },
      figures.map(([value, name]) =>
        el("li", {}, el("b", {}, count(value)), " ", el("span", {}, name)),
      ),
    ),
  );
  return [
    histogram(made.bins, {
      title: `Lengths of ${what}`,
      unit: "tokens, by powers of two",
      what,
      height: 168,
      marks: [{ value: made.median, name: "median" }],
    }),
    made.looked_at < made.documents &&
      el(
        "p",
        { class: "hint" },
        `${count(made.looked_at)} of ${count(made.documents)} were looked at.`,
      ),
  ];
}

async function page(store, query, to) {
  const start = Number(query.start) || 0;
  const { total, documents: rows } = await get(`stores/${store}/documents`, {
    split: query.split,
    start,
    limit: LIMIT,
  });
  if (total > 0 && start >= total)
    throw missing(
      `There is no document ${count(start)}: split ${query.split} has ${count(total)}, numbered 0 to ${count(total - 1)}.`,
    );
  if (total === 0) return empty("No documents in this split.", "Choose another one above.");
  const walk = pager({
    start,
    limit: LIMIT,
    total,
    what: "documents",
    go: (next) => to({ start: next || null }),
  });
  return [
    el(
      "ol",
      { class: "rows", "aria-label": "Documents" },
      rows.map((row) =>
        line(store, query.split, row.document, null, [
          el(
            "span",
            { class: "row-text" },
            speaker(row.role),
            row.preview === "" ? el("em", { class: "muted" }, "no text") : oneLine(row.preview),
          ),
          el(
            "span",
            { class: "row-facts" },
            plural(row.tokens, "token"),
            row.trained === null
              ? null
              : el(
                  "span",
                  { class: row.trained > 0 && "row-trained" },
                  `${count(row.trained)} trained`,
                ),
          ),
        ]),
      ),
    ),
    walk,
  ];
}

function line(store, split, number, at, inside) {
  const href = make({ store, view: "document", rest: String(number), query: { split, at } });
  return el(
    "li",
    {},
    link([el("span", { class: "row-number" }, count(number)), ...inside], href, { class: "row" }),
  );
}

async function found(store, query) {
  const hits = el("ol", { class: "rows", "aria-label": "Matches" }),
    state = el("div", { class: "pager", id: "search-state" });
  let total = 0,
    scanned = 0,
    unreadable = 0;
  const goOn = async (after) => {
    const answer = await get(`stores/${store}/search`, {
      split: query.split,
      kind: query.kind ?? "text",
      q: query.q,
      after,
    });
    total += answer.matches.length;
    scanned += answer.scanned;
    unreadable += answer.unreadable;
    hits.append(
      ...answer.matches.map((match) =>
        line(store, query.split, match.document, match.at, [snippet(match)]),
      ),
    );
    const looked = `${plural(total, "match", "matches")}; looked at ${count(scanned)} of ${count(answer.total)}`;
    announce(looked);
    show(
      state,
      el("span", {}, looked, unreadable > 0 && `; ${count(unreadable)} are no text`),
      answer.next !== null && button("Continue", () => into(state, () => goOn(answer.next))),
      total === 0 &&
        answer.next === null &&
        el(
          "span",
          { class: "muted" },
          "Nothing found. Words are looked for as they stand, in this split alone.",
        ),
    );
  };
  await goOn(null);
  return [hits, state];
}

function snippet({ snippet: text, from, to, role }) {
  const part = (start, stop) => oneLine(text.slice(start, stop));
  const marked = to > from ? [part(0, from), el("mark", {}, part(from, to)), part(to)] : part(0);
  return el("span", { class: "row-text" }, speaker(role), marked);
}

/** Who says it, in a conversation. */
const speaker = (role) => (role ? [el("b", { class: "row-role" }, role), " "] : null);
