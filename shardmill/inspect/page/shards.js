// Shards of a store, a page at a time, and the check of all their hashes.
//
// In: the answer about a store.  Out: a section.
// Promise: the check runs in the server; a page that is opened again finds it where it is.

import { get, post, wasLeft } from "./api.js";
import { announce, button, el, show } from "./dom.js";
import { bytes, count, percent, plural, short } from "./format.js";
import { choice, failure, into, pager, table } from "./parts.js";

const LIMIT = 10,
  AGAIN = 300;
const SIGNS = {
  ok: "\u2713 ok",
  damaged: "\u2717 damaged",
  missing: "\u2717 missing",
  unchecked: "\u2013 unchecked",
};

export function shardSection(store) {
  const list = el("div", { class: "steady" }),
    state = el("div", { class: "verify", "aria-live": "polite" });
  let split = store.splits[0]?.name,
    start = 0;
  const pick = el("div");
  const read = () =>
    into(list, () =>
      shardPage(store, split, start, (next) => {
        start = next;
        read();
      }),
    );
  const choose = (name) => {
    [split, start] = [name, 0];
    if (store.splits.length > 1)
      show(
        pick,
        choice(
          "Split",
          store.splits.map((one) => [one.name, one.name]),
          split,
          choose,
        ),
      );
    read();
  };
  const made = el(
    "section",
    { id: "shards" },
    el("div", { class: "bar-row" }, el("h2", {}, "Shards"), pick, state),
    list,
  );
  if (split === undefined) return null;
  choose(split);
  watch(store.store, state, read);
  return made;
}

async function shardPage(store, split, start, go) {
  const { total, shards } = await get(`stores/${store.store}/shards`, {
    split,
    start,
    limit: LIMIT,
  });
  return [
    table(
      [
        { name: "file", head: true, cell: (shard) => el("code", {}, shard.file) },
        { name: "tokens", number: true, cell: (shard) => count(shard.tokens) },
        { name: "documents", number: true, cell: (shard) => count(shard.documents) },
        { name: "size", number: true, cell: (shard) => bytes(shard.bytes) },
        {
          name: "sha256",
          cell: (shard) => el("code", { title: shard.sha256 }, short(shard.sha256)),
        },
        {
          name: "status",
          cell: (shard) =>
            el("span", { class: `status ${shard.status}` }, SIGNS[shard.status] ?? shard.status),
        },
      ],
      shards,
      { caption: `Shards of ${split}` },
    ),
    total > LIMIT && pager({ start, limit: LIMIT, total, what: "shards", go }),
  ];
}

/** Show how far the check is, until it ends. */
async function watch(number, place, changed, started = false) {
  try {
    for (;;) {
      const state = await get(`stores/${number}/verify`);
      show(
        place,
        report(state, () => begin(number, place, changed)),
      );
      if (state.state !== "running") {
        if (started) {
          changed();
          announce(`Verified: ${plural(state.problems.length, "problem")}`);
        }
        return;
      }
      started = true;
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
  } catch (error) {
    if (wasLeft(error)) return;
    show(
      place,
      failure(error, () => watch(number, place, changed, started)),
    );
  }
}

async function begin(number, place, changed) {
  try {
    await post(`stores/${number}/verify`);
  } catch (error) {
    if (!wasLeft(error))
      show(
        place,
        failure(error, () => begin(number, place, changed)),
      );
    return;
  }
  await watch(number, place, changed, true);
}

function report(state, start) {
  if (state.state === "running") {
    const share = state.total_bytes ? state.done_bytes / state.total_bytes : 0;
    return [
      el("progress", { max: "1", value: share, "aria-label": "Verified" }),
      el("span", {}, `${percent(share, 0)} of ${bytes(state.total_bytes)}`),
    ];
  }
  const again = button(state.state === "never" ? "Verify every hash" : "Verify again", start, {
    id: "verify",
  });
  const found = state.num_problems ?? state.problems.length;
  if (state.state === "never") return again;
  if (found === 0)
    return [el("span", { class: "status ok" }, "\u2713 every file is as it was written"), again];
  return [
    el("span", { class: "status damaged" }, `\u2717 ${plural(found, "problem")}`),
    again,
    el(
      "ul",
      { class: "problems" },
      state.problems.slice(0, 50).map((problem) => el("li", {}, problem)),
    ),
  ];
}
