// Charts as inline SVG, each with a title and a table that says the same.
//
// In: numbers.  Out: a figure.
// Promise: drawn with DOM calls; scales with its place; nothing is shown by colour alone.
// Not here: the flow diagram (flow.js), bars of packed rows (plans.js).

import { scale, ticks } from "./axis.js";
import { el, freshId, svg } from "./dom.js";
import { count, percent, rough } from "./format.js";
import { table } from "./parts.js";

/** On a phone drawings have less room, so that their words stay readable. */
export const narrow = () => innerWidth < 640;

/** A figure: the drawing, named for screen readers, and its numbers below. */
export function figure({
  title,
  description,
  width,
  height,
  drawing,
  columns,
  rows,
  className = "",
  caption = null,
}) {
  const name = freshId("chart");
  const shown =
    rows.length > 400 ? rows.filter((_, at) => at % Math.ceil(rows.length / 400) === 0) : rows;
  return el(
    "figure",
    { class: `chart ${className}` },
    caption && el("figcaption", {}, caption),
    svg(
      "svg",
      {
        role: "img",
        "aria-labelledby": `${name}-t ${name}-d`,
        viewBox: `0 0 ${width} ${height}`,
        preserveAspectRatio: "xMidYMid meet",
      },
      svg("title", { id: `${name}-t` }, title),
      svg("desc", { id: `${name}-d` }, description),
      drawing,
    ),
    el(
      "details",
      { class: "numbers" },
      el("summary", {}, "As a table"),
      table(columns, shown, { caption: title }),
    ),
  );
}

const tip = (shape, text) => {
  shape.append(svg("title", {}, text));
  return shape;
};

function grid(values, y, left, right, text) {
  return values.map((value) => [
    svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
    svg(
      "text",
      { class: "tick", x: left - 6, y: y(value) + 3.5, "text-anchor": "end" },
      text(value),
    ),
  ]);
}

/** bins: [{from, to, count}]; bars of equal width, since bins are powers of two. */
export function histogram(
  bins,
  { title, unit, what, width = narrow() ? 400 : 560, height = 190, marks = [] },
) {
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  const left = 44,
    right = width - 8,
    top = marks.length ? 24 : 12,
    bottom = height - 34;
  const y = scale(0, most, bottom, top);
  const step = (right - left) / Math.max(1, bins.length);
  const every = Math.ceil(bins.length / Math.max(1, Math.floor((right - left) / 46)));
  const bars = bins.map((bin, at) =>
    tip(
      svg("rect", {
        class: "bar",
        x: left + at * step + 1,
        width: Math.max(1, step - 2),
        y: bin.count ? Math.min(y(bin.count), bottom - 1.5) : bottom,
        height: bin.count ? Math.max(1.5, bottom - y(bin.count)) : 0,
        rx: 1.5,
      }),
      `${count(bin.from)} to ${count(bin.to - 1)} ${unit}: ${count(bin.count)} ${what}`,
    ),
  );
  const names = bins.map(
    (bin, at) =>
      at % every === 0 &&
      svg("text", { class: "tick", x: left + at * step + 1, y: bottom + 14 }, rough(bin.from)),
  );
  const lines = marks.map(({ value, name }) => {
    const bin = bins.findIndex((one) => value >= one.from && value < one.to);
    if (bin < 0) return null;
    const inside = (value - bins[bin].from) / (bins[bin].to - bins[bin].from);
    const x = left + (bin + inside) * step;
    return [
      svg("line", { class: "mark-halo", x1: x, x2: x, y1: top - 8, y2: bottom }),
      svg("line", { class: "mark-line", x1: x, x2: x, y1: top - 8, y2: bottom }),
      svg("text", { class: "mark-name", x: x + 4, y: top - 6 }, name),
    ];
  });
  return figure({
    caption: title,
    title,
    width,
    height,
    columns: binColumns(unit, what),
    rows: bins,
    description: `${bins.length} bars; the longest stands for ${count(most)} ${what}.`,
    drawing: [
      grid(ticks(0, most, 3).filter(Number.isInteger), y, left, right, rough),
      bars,
      names,
      lines,
      svg("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }),
      svg("text", { class: "axis-name", x: right, y: height - 4, "text-anchor": "end" }, unit),
    ],
  });
}

const binColumns = (unit, what) => [
  { name: "from", number: true, cell: (bin) => count(bin.from) },
  { name: `to (${unit})`, number: true, cell: (bin) => count(bin.to - 1) },
  { name: what, number: true, cell: (bin) => count(bin.count) },
];

const SHARES = { width: 1120, left: 48, right: 990 },
  PHASE = 64; // the least width of a phase, that of its name

/** Where samples lie on the axis: [sample, x] at each phase border and at the end. Every phase has
 * room for its name; what is left is shared in proportion to the samples. */
function knots(phases, last) {
  const { left, right } = SHARES;
  const starts = phases.map((phase) => phase.start).filter((start) => start < last);
  const stops = [...starts.slice(1), last];
  const least = Math.min(PHASE, (right - left) / starts.length);
  const own = starts.map((start, at) => ((stops[at] - start) / last) * (right - left));
  const missing = own.reduce((sum, wide) => sum + Math.max(0, least - wide), 0);
  const spare = own.reduce((sum, wide) => sum + Math.max(0, wide - least), 0);
  let at = left;
  const found = own.map((wide, phase) => {
    const from = [starts[phase], at];
    at += wide < least ? least : wide - (missing * (wide - least)) / Math.max(spare, 1e-9);
    return from;
  });
  return [...found, [last, right]];
}

/** Whether some phase is drawn wider than in proportion. */
export function stretched({ phases, samples }) {
  const { left, right } = SHARES;
  return knots(phases, samples).some(
    ([sample, x]) => Math.abs(x - (left + (sample / samples) * (right - left))) > 1,
  );
}

/** Shares of sources over samples: lines, or areas on top of one another, phase by phase. */
export function shares({ points, names, phases, stacked, unit }) {
  const { width, left, right } = SHARES,
    height = 380,
    top = 26,
    bottom = height - 36;
  const last = Math.max(1, points[points.length - 1]?.sample ?? 1);
  const fixed = knots(phases, last);
  const x = (sample) => {
    const at = Math.max(
      1,
      fixed.findIndex(([end]) => sample <= end),
    );
    return scale(fixed[at - 1][0], fixed[at][0], fixed[at - 1][1], fixed[at][1])(sample);
  };
  const y = scale(0, 1, bottom, top);
  const lines = names.map((name, source) => series(points, source, x, y, stacked));
  const inside = phases.filter((phase) => phase.start < last);
  return figure({
    className: "shares",
    title: `Share of each source over ${unit}`,
    width,
    height,
    description: `${names.length} sources, ${inside.length} phases, ${count(last)} ${unit}.`,
    drawing: [
      grid([0, 0.25, 0.5, 0.75, 1], y, left, right, (share) => `${Math.round(share * 100)}%`),
      lines,
      !stacked && planned(inside, names, last, x, y),
      borders(inside, x, top, bottom),
      ends(points, names, y, right + 8, stacked),
      sampleTicks(inside, last, x).map((value) =>
        svg(
          "text",
          { class: "tick", x: x(value), y: bottom + 16, "text-anchor": "middle" },
          rough(value),
        ),
      ),
      svg("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }),
      svg("text", { class: "axis-name", x: right, y: height - 4, "text-anchor": "end" }, unit),
    ],
    columns: [
      { name: unit, number: true, cell: (point) => count(point.sample) },
      ...names.map((name, source) => ({
        name,
        number: true,
        cell: (point) => `${percent(point.shares[source])} (${count(point.counts[source])})`,
      })),
    ],
    rows: points,
  });
}

const below = (point, source) => point.shares.slice(0, source).reduce((sum, one) => sum + one, 0);

function series(points, source, x, y, stacked) {
  // a share holds from the point before to this one
  const steps = (level) =>
    points.flatMap((point, at) =>
      [points[at - 1]?.sample ?? 0, point.sample].map(
        (sample) => `${x(sample).toFixed(1)},${y(level(point)).toFixed(1)}`,
      ),
    );
  const low = (point) => (stacked ? below(point, source) : 0);
  const upper = steps((point) => low(point) + point.shares[source]);
  if (!stacked) return svg("polyline", { class: `line s${source % 8}`, points: upper.join(" ") });
  const lower = steps(low).reverse();
  return svg("polygon", { class: `area s${source % 8}`, points: [...upper, ...lower].join(" ") });
}

function planned(phases, names, last, x, y) {
  return phases.map((phase, at) =>
    names.map((_, source) =>
      svg("line", {
        class: `wanted s${source % 8}`,
        x1: x(phase.start),
        x2: x(Math.min(last, phases[at + 1]?.start ?? last)),
        y1: y(phase.shares[source]),
        y2: y(phase.shares[source]),
      }),
    ),
  );
}

const TICK = 48; // the width of a number at the axis

/** Phase borders first, then the end and round numbers, where they have room. */
function sampleTicks(phases, last, x) {
  const kept = [];
  for (const value of [...phases.map((phase) => phase.start), last, ...ticks(0, last, 8)])
    if (kept.every((one) => Math.abs(x(one) - x(value)) >= TICK)) kept.push(value);
  return kept;
}

/** A line where each phase begins, with its name; with many phases, with its number or nothing. */
function borders(phases, x, top, bottom) {
  const wide = phases.slice(1).map((phase, at) => x(phase.start) - x(phases[at].start));
  const room = Math.min(...wide);
  const text = (at) => (room >= PHASE - 1 ? `phase ${at + 1}` : room >= 24 ? at + 1 : null);
  return phases.map((phase, at) => [
    svg("line", {
      class: "phase",
      x1: x(phase.start),
      x2: x(phase.start),
      y1: top - 12,
      y2: bottom,
    }),
    text(at) !== null &&
      svg("text", { class: "phase-name", x: x(phase.start) + 5, y: top - 4 }, text(at)),
  ]);
}

/** Names at the right end, moved apart. */
function ends(points, names, y, x, stacked) {
  const point = points[points.length - 1];
  if (!point) return null;
  const places = names.map((name, source) => ({
    name,
    source,
    at: y(stacked ? below(point, source) + point.shares[source] / 2 : point.shares[source]),
  }));
  places.sort((one, other) => one.at - other.at);
  places.forEach((place, at) => {
    if (at) place.at = Math.max(place.at, places[at - 1].at + 15);
  });
  return places.map(({ name, source, at }) => [
    svg("rect", { class: `swatch s${source % 8}`, x, y: at - 5, width: 9, height: 9, rx: 2 }),
    svg(
      "text",
      { class: "end-name", x: x + 14, y: at + 3.5 },
      name.length > 16 ? `${name.slice(0, 15)}\u2026` : name,
    ),
  ]);
}
