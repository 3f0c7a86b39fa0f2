// One row of a batch: its documents, its borders, its labels.
//
// In: a row of /api/step.  Out: a card that makes its tokens when it is opened.
// Promise: every token of the row can be reached; a token's document is a link where its store is
// open.

import { el, link, show } from "./dom.js";
import { count, plural, range } from "./format.js";
import { into, pager } from "./parts.js";
import { make } from "./route.js";
import { runsOf, tokenList } from "./tokens.js";

const PART = 2048;

/** `read(from)`: the same row with the tokens from there on. */
export function stepRow(row, open, { all, teller, read, length }) {
  const body = el("div", { class: "step-body" });
  const store =
    all.stores.find((one) => one.path === row.path && row.split !== null)?.store ?? null;
  const part = (shown) => [
    tokensOf(shown, store, teller),
    parts(shown.view, length, (from) => into(body, async () => part(await read(from)))),
  ];
  const fill = () => {
    if (!body.hasChildNodes()) show(body, part(row));
  };
  const from = `${row.source}${row.split === null ? "" : `/${row.split}`}`;
  const made = el(
    "details",
    { class: "card step-row", open },
    el(
      "summary",
      {},
      el("b", {}, `sample ${count(row.sample)}`),
      el(
        "span",
        { class: "muted" },
        ` ${from}, epoch ${count(row.epoch)}, window ${count(row.window)}`,
        row.documents && `, ${plural(row.documents.length, "document")}`,
      ),
    ),
    body,
  );
  made.addEventListener("toggle", () => made.open && fill());
  if (open) fill();
  return made;
}

function parts(view, length, go) {
  if (view.start === 0 && view.stop >= length) return null;
  return pager({
    start: view.start,
    limit: PART,
    stop: view.stop,
    total: length,
    what: "tokens",
    go,
  });
}

function tokensOf(row, store, teller) {
  const { view } = row;
  const own = (piece) => row.documents?.[piece];
  const tell = teller(view, (at) => about(row, store, at));
  const runs = runsOf(row.documents ? view.piece : null, view.ids.length, (piece) =>
    own(piece) ? `document ${count(own(piece).document)}` : "padding",
  );
  for (const run of runs) {
    run.waste = row.documents !== null && !own(run.run);
    if (own(run.run)) {
      run.note = `tokens ${range(own(run.run).start, own(run.run).stop)}${border(view, run)}`;
    }
  }
  return [
    view.note && el("p", { class: "note" }, view.note),
    tokenList(view, runs, { name: `Tokens of sample ${row.sample}`, tell }),
  ];
}

function about(row, store, at) {
  const { view } = row,
    column = view.start + at,
    piece = view.piece?.[at],
    own = row.documents?.[piece];
  const unknown = row.documents ? "padding" : "unknown";
  const number = own && count(own.document);
  const named =
    own && store !== null ? link(number, documentAt(store, row.split, own.document)) : number;
  return {
    position: own ? own.start + column - row.edges[piece] : null,
    store,
    split: row.split,
    more: [
      ["sample", count(row.sample)],
      ["document", named ?? unknown],
    ],
  };
}

function border(view, run) {
  if (view.start + run.start === 0 || view.trained === null) return "";
  return view.trained[run.start]
    ? ", its first token is a label of the one before"
    : ", its first token is no label";
}

const documentAt = (store, split, number) =>
  make({ store, view: "document", rest: String(number), query: { split } });
