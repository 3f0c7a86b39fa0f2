// One document or conversation, token by token, as text, or as bubbles.
//
// In: /documents/N.  Out: the view.
// Promise: a page of tokens at a time, whatever the length; the address names the page, the token
// and the way of looking.
// Not here: boxes (tokens.js), the panel (details.js), bubbles (chat.js).

import { get } from "./api.js";
import { bubbles } from "./chat.js";
import { detailsPanel } from "./details.js";
import { button, el, link } from "./dom.js";
import { count, percent, plural } from "./format.js";
import { choice, into, pager } from "./parts.js";
import { make, replaceQuietly } from "./route.js";
import { barOf, foldOf, legend, plainText, runsOf, tokenList } from "./tokens.js";

const LIMIT = 2000;

export async function document_(place, { route, go, keys }) {
  const number = Number(route.rest);
  await into(
    place,
    async () => {
      const at = route.query.at === undefined ? null : Number(route.query.at);
      const start =
        route.query.start === undefined
          ? Math.floor((at ?? 0) / LIMIT) * LIMIT
          : Number(route.query.start);
      const [store, found] = await Promise.all([
        get(`stores/${route.store}`),
        get(`stores/${route.store}/documents/${number}`, {
          split: route.query.split,
          start,
          limit: LIMIT,
        }),
      ]);
      const total = store.splits.find((one) => one.name === found.split).documents;
      const walk = (step) => {
        const next = number + step;
        if (next >= 0 && next < total)
          go({
            ...route,
            rest: String(next),
            query: { split: found.split, look: route.query.look },
          });
      };
      keys.walk(walk);
      return [
        head(store, found, total, walk),
        note(found),
        way(route, found, at, go),
        (start > 0 || found.view.stop < found.num_tokens) &&
          pager({
            start,
            limit: LIMIT,
            stop: found.view.stop,
            total: found.num_tokens,
            what: "tokens",
            go: (next) =>
              go({ ...route, query: { split: found.split, look: route.query.look, start: next } }),
          }),
      ];
    },
    "Document",
  );
}

function head(store, found, total, walk) {
  const name = found.kind === "chat" ? "Conversation" : "Document";
  const trained =
    found.turns === null ? null : found.turns.reduce((sum, turn) => sum + turn.trained, 0);
  const list = make({
    store: store.store,
    view: "documents",
    query: { split: found.split, start: Math.floor(found.document / 50) * 50 },
  });
  return el(
    "div",
    { class: "title" },
    el("h1", {}, `${name} ${count(found.document)}`),
    el(
      "span",
      { class: "muted" },
      "of ",
      link(`${count(total)} in ${store.name}/${found.split}`, list),
    ),
    el(
      "div",
      { class: "choice" },
      button("\u2190 Previous", () => walk(-1), { disabled: found.document === 0 }),
      button("Next \u2192", () => walk(1), { disabled: found.document + 1 >= total }),
    ),
    el(
      "p",
      { class: "path" },
      `${plural(found.num_tokens, "token")} from ${count(found.first_token)} on`,
      trained !== null && `, ${plural(found.turns.length, "turn")}, ${count(trained)} trained`,
      trained !== null && found.num_tokens > 0 && ` (${percent(trained / found.num_tokens)})`,
    ),
  );
}

const note = ({ view }) => (view.note ? el("p", { class: "note" }, view.note) : null);

function way(route, found, at, go) {
  const looks = [
    ["tokens", "Tokens"],
    ["text", "Text"],
    ...(found.turns ? [["chat", "Chat"]] : []),
  ];
  const look = looks.some(([name]) => name === route.query.look) ? route.query.look : "tokens";
  const pick = choice("Look at it as", looks, look, (next) =>
    go({ ...route, query: { ...route.query, look: next === "tokens" ? null : next } }),
  );
  const bar = el(
    "div",
    { class: "bar-row" },
    pick,
    legend(found.view, {
      signs: look === "tokens",
      bars: look === "tokens" && found.turns !== null,
    }),
  );
  if (found.view.ids.length === 0)
    return [bar, el("p", { class: "empty" }, "It has no tokens here.")];
  if (look === "text")
    return [
      bar,
      el(
        "div",
        { class: "paper", dir: "auto", tabindex: "0", role: "region", "aria-label": "Text" },
        plainText(found.view),
      ),
    ];
  if (look === "chat") return [bar, bubbles(found.view, found.turns)];
  return [bar, boxes(route, found, at)];
}

function boxes(route, found, at) {
  const { view } = found;
  const turn = (number) => found.turns?.find((one, place) => (one.turn ?? place) === number);
  const roleOf = (number) => turn(number)?.role ?? null;
  const { panel, teller } = detailsPanel();
  const tell = teller(view, (place) => ({
    position: found.first_token + view.start + place,
    store: route.store,
    split: found.split,
    more:
      view.turn === null
        ? []
        : [
            ["role", roleOf(view.turn[place]) ?? "before the first turn"],
            ["turn", view.turn[place] < 0 ? null : count(view.turn[place])],
          ],
  }));
  const runs = runsOf(
    view.turn,
    view.ids.length,
    (number) => roleOf(number) ?? "before the first turn",
  );
  for (const run of runs) {
    const said = turn(run.run);
    if (!said) continue;
    run.note = `turn ${count(run.run)}, ${count(said.trained)} trained`;
    run.bar = barOf(said.trained, said.stop - said.start); // of all of it, on this page or not
    run.folds = foldOf(said.role, run.stop - run.start, said.stop - said.start);
  }
  const told = (place, sticky) => {
    tell(place, sticky);
    if (sticky && place !== null)
      replaceQuietly({ ...route, query: { ...route.query, at: view.start + place } });
  };
  const chosen = at === null || at < view.start || at >= view.stop ? null : at - view.start;
  return el(
    "div",
    { class: "with-details" },
    tokenList(view, runs, { name: `Tokens of document ${found.document}`, tell: told, chosen }),
    panel,
  );
}
