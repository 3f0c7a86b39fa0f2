// How a mixture develops: the share of each source, phase by phase.
//
// In: /api/mixture.  Out: the view.

import { get } from "./api.js";
import { shares, stretched } from "./charts.js";
import { el, section } from "./dom.js";
import { count, percent, plural } from "./format.js";
import { choice, code, empty, field, into, table } from "./parts.js";

/** Name, label, what is asked for when nothing is typed; null: the server chooses by the phases. */
const FIELDS = [
  ["samples", "Samples", null],
  ["points", "Points", null],
  ["seq_len", "seq_len", 1024],
  ["batch_size", "Batch size", 1],
  ["world", "World", 1],
];

export async function mixture(place, { route, go, all }) {
  if (!all.mixture) {
    await into(place, async () => [
      el("div", { class: "title" }, el("h1", {}, "Mixture")),
      empty("No mixture is open.", [
        "Start the page with the config of a training: ",
        code("shardmill view --config train.toml"),
      ]),
    ]);
    return;
  }
  await into(
    place,
    async () => {
      const asked = Object.fromEntries(
        FIELDS.map(([name, , usual]) => [name, route.query[name] ?? usual]),
      );
      const found = await get("mixture", asked);
      const names = found.sources.map((source) => source.name);
      const stacked = route.query.look === "areas";
      const pick = choice(
        "Chart",
        [
          ["lines", "Lines"],
          ["areas", "Areas"],
        ],
        stacked ? "areas" : "lines",
        (look) => go({ ...route, query: { ...route.query, look: look === "areas" ? look : null } }),
      );
      return [
        el(
          "div",
          { class: "title" },
          el("h1", {}, "Mixture"),
          el("span", { class: "muted" }, `${count(names.length)} sources, seed ${found.seed}`),
          pick,
        ),
        form(route, asked, found, go),
        el(
          "p",
          { class: "hint" },
          stacked
            ? "Shares of each source, on top of one another."
            : "Solid: what is drawn between two points. Dashed: what the phase asks for.",
          stretched(found) && " Short phases are drawn wider than they are, so that each is seen.",
          beyond(found),
        ),
        shares({ points: found.points, names, phases: found.phases, stacked, unit: "samples" }),
        el(
          "div",
          { class: "two" },
          section("Phases", phases(found, names)),
          section("Sources", sources(found)),
        ),
      ];
    },
    "Mixture",
  );
}

/** Phases that begin after what is drawn. */
function beyond({ phases: found, samples }) {
  const out = found.filter((phase) => phase.start >= samples);
  if (out.length === 0) return null;
  return ` ${plural(out.length, "phase begins", "phases begin")} after the last sample drawn.`;
}

function form(route, asked, found, go) {
  const send = (event) => {
    event.preventDefault();
    go({ ...route, query: { ...route.query, ...Object.fromEntries(new FormData(event.target)) } });
  };
  return el(
    "form",
    { class: "form", "aria-label": "What is drawn", on: { submit: send } },
    FIELDS.map(([name, text]) =>
      field(
        text,
        el("input", {
          type: "number",
          name,
          min: "1",
          value: asked[name] ?? "",
          required: FIELDS.find(([one]) => one === name)[2] !== null,
          placeholder: name === "samples" ? String(found.samples) : "auto",
        }),
      ),
    ),
    el("button", { type: "submit", class: "main" }, "Draw"),
  );
}

const phases = ({ phases: found }, names) =>
  table(
    [
      { name: "phase", head: true, cell: (phase) => String(phase.number) },
      { name: "from sample", number: true, cell: (phase) => count(phase.start) },
      ...names.map((name, source) => ({
        name,
        number: true,
        cell: (phase) => percent(phase.shares[source]),
      })),
    ],
    found.map((phase, at) => ({ ...phase, number: at + 1 })),
    { caption: "Phases" },
  );

function sources({ sources: found, points }) {
  const drawn = points[points.length - 1]?.counts ?? [];
  return table(
    [
      { name: "source", head: true, cell: (source) => source.name },
      {
        name: "store",
        cell: (source) =>
          [source.store ?? source.path, source.split].filter((part) => part !== null).join("/"),
      },
      { name: "rows", number: true, cell: (source) => count(source.rows) },
      { name: "drawn", number: true, cell: (source) => count(drawn[source.at]) },
      {
        name: "epochs",
        number: true,
        cell: (source) => (source.rows ? (drawn[source.at] / source.rows).toFixed(2) : "-"),
      },
    ],
    found.map((source, at) => ({ ...source, at })),
    { caption: "Sources" },
  );
}
