// Where the page is, kept in the address so that it can be shared.
//
// In: location.hash.  Out: {store, view, rest, query}.
// Promise: parse(make(x)) is x; a strange address is the overview of the first store.
// Not here: what a view does with it.

export const VIEWS = ["overview", "documents", "document", "plan", "mixture", "step"];

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path
    .split("/")
    .map(decode)
    .filter((part) => part !== "");
  const numbered = /^\d+$/.test(parts[0] ?? "");
  const store = numbered ? Number(parts.shift()) : null;
  const view = VIEWS.includes(parts[0]) ? parts[0] : "overview";
  return {
    store,
    view,
    rest: parts[1] ?? null,
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (error instanceof URIError) return "";
    throw error;
  }
}

export function make({ store = null, view, rest = null, query = {} }) {
  const parts = [store, view, rest]
    .filter((part) => part !== null)
    .map((part) => encodeURIComponent(part));
  const kept = Object.entries(query).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const asked = new URLSearchParams(kept).toString();
  return `#/${parts.join("/")}${asked ? `?${asked}` : ""}`;
}

/** Change the address without a new entry in the history, and without opening the view again. */
export function replaceQuietly(route) {
  history.replaceState(null, "", make(route));
}
