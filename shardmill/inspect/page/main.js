// The page: which view is open, the bar above it.
//
// In: the address.  Out: a view in <main>.
// Promise: every change of view goes through the address, so back and forward work; what a view
// asked is dropped when it is left.

import { get, startView } from "./api.js";
import { el, link, show } from "./dom.js";
import { startKeys } from "./keys.js";
import { plural } from "./format.js";
import { empty, failure, missing } from "./parts.js";
import { make, parse } from "./route.js";
import { startTheme } from "./theme.js";
import { document_ } from "./view-document.js";
import { documents } from "./view-documents.js";
import { mixture } from "./view-mixture.js";
import { overview } from "./view-overview.js";
import { plans } from "./view-plans.js";
import { step } from "./view-step.js";

const VIEWS = { overview, documents, document: document_, plan: plans, mixture, step };
const NAV = [
  ["overview", "Overview"],
  ["documents", "Documents"],
  ["plan", "Plans"],
  ["mixture", "Mixture"],
  ["step", "Step"],
];
const place = document.getElementById("view"),
  picker = document.getElementById("store");
let all = { stores: [], mixture: false },
  lastStore = 0,
  shown = null;

const go = (route) => {
  location.hash = make(route);
};

function target(view) {
  if (view === "mixture" || (view === "step" && all.stores.length === 0)) return { view };
  return { store: lastStore, view };
}

function bar(route) {
  const current = route.view === "document" ? "documents" : route.view;
  show(
    document.getElementById("nav"),
    NAV.map(([view, name]) =>
      link(name, make(target(view)), { "aria-current": view === current ? "page" : null }),
    ),
  );
  picker.value = String(lastStore);
}

async function open() {
  const route = parse(location.hash);
  if (route.view === "mixture") route.store = null;
  else if (route.store === null && !(route.view === "step" && all.mixture)) route.store = lastStore;
  const known = all.stores.find((one) => one.store === route.store);
  if (known) lastStore = known.store;
  startView();
  place.dataset.opened = Number(place.dataset.opened ?? 0) + 1; // for those who wait for a view
  keys.forget();
  bar(route);
  document.title = `${known ? `${known.name} - ` : ""}${route.view ?? "no such page"} - shardmill`;
  const fresh = el("div", { class: `view ${route.view ?? ""}` });
  show(place, fresh);
  if (shown !== null && shown !== route.view) place.focus({ preventScroll: true });
  if (shown !== route.view) scrollTo(0, 0);
  shown = route.view;
  if (route.view === null)
    show(fresh, el("h1", {}, "No such page"), failure(missing(`There is no page ${location.hash}`)));
  else if (route.store !== null && all.stores.length === 0)
    show(
      fresh,
      empty(
        "No store is open.",
        "Start the page with a folder that holds stores: shardmill view FOLDER",
      ),
    );
  else if (route.store !== null && !known)
    show(
      fresh,
      el("h1", {}, "No such store"),
      failure(
        missing(
          `There is no store ${route.store}; this page shows ${plural(all.stores.length, "store")}, counted from 0.`,
        ),
      ),
    );
  else if (known?.error)
    show(fresh, el("h1", {}, known.name), failure({ message: known.error }, start));
  else await VIEWS[route.view](fresh, { route, go, keys, all });
}

function search() {
  const box = document.getElementById("search");
  if (box) {
    box.focus();
    box.select();
    return;
  }
  go({ store: lastStore, view: "documents" });
  const seen = new MutationObserver(() => {
    const found = document.getElementById("search");
    if (found) {
      seen.disconnect();
      found.focus();
    }
  });
  seen.observe(place, { childList: true, subtree: true });
}

async function start() {
  try {
    all = await get("stores");
  } catch (error) {
    show(place, failure(error, start));
    return;
  }
  show(
    picker,
    all.stores.map((one) =>
      el("option", { value: one.store }, one.error ? `${one.name} (cannot be opened)` : one.name),
    ),
  );
  lastStore = all.stores.find((one) => !one.error)?.store ?? 0;
  await open();
}

const keys = startKeys({ open: (view) => go(target(view)), search });
startTheme(document.getElementById("theme"));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  place.focus();
});
picker.addEventListener("change", () =>
  go({
    store: Number(picker.value),
    view: ["documents", "plan"].includes(shown) ? shown : "overview",
  }),
);
addEventListener("hashchange", open);
start();
