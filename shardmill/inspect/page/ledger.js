// A store's ledger as two flows: documents and tokens.
//
// In: the answer about a store.  Out: nodes and links, each bucket of the ledger once.
// Promise: a bucket that this file does not know is shown under its own name; zero buckets are
// left out.

const words = (key) => key.replaceAll("_", " ");

const node = (name, value, kind) => ({ name, value, kind });

function buckets(entry, known) {
  const found = [];
  for (const [key, value] of Object.entries(entry)) {
    if (known.includes(key)) continue;
    if (typeof value === "number" && value > 0) found.push(node(words(key), value, "lost"));
    if (value !== null && typeof value === "object") {
      for (const [reason, rows] of Object.entries(value)) {
        if (rows > 0) found.push(node(`${words(key)}: ${words(reason)}`, rows, "lost"));
      }
    }
  }
  return found;
}

export function documentFlow(store) {
  const entry = store.ledger.documents;
  const read = node("read", entry.read, "input");
  const kept = store.splits.map((split) => node(split.name, split.documents, "kept"));
  const lost = buckets(entry, ["read", "kept"]);
  const ends = [...kept.filter((one) => one.value > 0), ...lost];
  return {
    columns: [[read], ends],
    links: ends.map((to) => ({ from: read, to, value: to.value })),
  };
}

export function tokenFlow(store) {
  const entry = store.ledger.tokens;
  const inputs = [
    node("text", entry.encoded, "input"),
    node("separators", entry.separators, "input"),
  ].filter((one) => one.value > 0);
  const all = node(
    "tokens",
    inputs.reduce((sum, one) => sum + one.value, 0),
    "input",
  );
  const kept = store.splits
    .filter((split) => split.tokens > 0)
    .map((split) => node(split.name, split.tokens, "kept"));
  const lost = buckets(entry, ["encoded", "separators", "kept"]);
  const ends = [...kept, ...lost];
  const links = ends.map((to) => ({ from: all, to, value: to.value }));
  const chat = store.splits.filter((split) => split.tokens > 0 && split.trained_tokens !== null);
  if (chat.length === 0) {
    if (inputs.length < 2) return { columns: [[all], ends], links };
    return {
      columns: [inputs, [all], ends],
      links: [...inputs.map((from) => ({ from, to: all, value: from.value })), ...links],
    };
  }
  const sum = (of) => chat.reduce((total, split) => total + of(split), 0);
  const trained = node(
    "trained",
    sum((split) => split.trained_tokens),
    "kept",
  );
  const context = node(
    "context only",
    sum((split) => split.tokens - split.trained_tokens),
    "plain",
  );
  for (const split of chat) {
    const from = kept.find((one) => one.name === split.name);
    links.push(
      { from, to: trained, value: split.trained_tokens },
      { from, to: context, value: split.tokens - split.trained_tokens },
    );
  }
  return {
    columns: [[all], ends, [trained, context]],
    links: links.filter((one) => one.value > 0),
  };
}
