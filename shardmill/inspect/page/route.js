// Where the page is, kept in the address so that it can be shared.
//
// In: location.hash.  Out: {store, view, rest, query}.
// Promise: parse(make(x)) is x; the empty address is the overview; any other address that names no
// view has the view null.
// Not here: what a view does with it.

/** What may follow the name of a view: nothing, or one part of this form. */
const REST = {
  overview: null,
  documents: null,
  document: /^\d+$/,
  plan: /^.*$/s,
  mixture: null,
  step: null,
};
const OPTIONAL = ["plan"];

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path
    .split("/")
    .filter((part) => part !== "")
    .map(decode);
  const numbered = /^\d+$/.test(parts[0] ?? "");
  const store = numbered ? Number(parts.shift()) : null;
  return {
    store,
    view: viewOf(parts),
    rest: parts[1] ?? null,
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function viewOf([view = "overview", rest, ...more]) {
  if (!Object.hasOwn(REST, view) || more.length > 0) return null;
  const form = REST[view];
  if (rest === undefined) return form === null || OPTIONAL.includes(view) ? view : null;
  return form !== null && form.test(rest) ? view : null;
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (error instanceof URIError) return part;
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
