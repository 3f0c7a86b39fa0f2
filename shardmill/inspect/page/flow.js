// Where everything went, as a flow from left to right.
//
// In: columns of nodes {name, value, kind}, and links {from, to, value} between neighbouring
// columns.
// Out: a figure.
// Promise: heights are in proportion, except that what is there is never thinner than two pixels;
// the numbers are at every node and in the table; no label covers another one or leaves the figure.
// Not here: what a ledger means (ledger.js).

import { figure, narrow } from "./charts.js";
import { svg } from "./dom.js";
import { count, percent } from "./format.js";

const THICK = 10,
  LEAST = 2,
  LINE = 15, // the height of a line of a label
  SPACE = 7, // between a node and its label
  BETWEEN = 6; // between two words of a label

function place(columns, height, top, gap) {
  const most = Math.max(...columns.map((column) => column.length));
  const room = height - top - gap * (most - 1) - 14;
  const total = Math.max(
    1,
    ...columns.map((column) => column.reduce((sum, node) => sum + node.value, 0)),
  );
  for (const column of columns) {
    let at = top;
    for (const node of column) {
      node.size = node.value === 0 ? 0 : Math.max(LEAST, (node.value / total) * room);
      node.y = at;
      node.out = at;
      node.in = at;
      at += Math.max(node.size, 4) + gap;
    }
  }
  return room / total;
}

function ribbon(link, unit) {
  const { from, to, value } = link;
  const thick = Math.max(1.2, Math.min(value * unit, from.size, to.size));
  const x1 = from.x + THICK,
    x2 = to.x,
    middle = (x1 + x2) / 2;
  const [a, b] = [from.out, to.in];
  from.out += value * unit;
  to.in += value * unit;
  const upper = `M${x1},${a}C${middle},${a} ${middle},${b} ${x2},${b}`;
  const [c, d] = [a + thick, b + thick];
  const path = `${upper}V${d}C${middle},${d} ${middle},${c} ${x1},${c}Z`;
  return svg(
    "path",
    { class: `ribbon ${to.kind}`, d: path },
    svg("title", {}, `${from.name} to ${to.name}: ${count(value)}`),
  );
}

const pen = new OffscreenCanvas(1, 1).getContext("2d");

function widthOf(text, bold) {
  pen.font = `${bold ? "600 " : ""}12.5px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

/** `text`, cut at the end so that it is not wider than `room`. */
function cut(text, room) {
  if (widthOf(text, true) <= room) return text;
  const characters = [...text];
  while (characters.length > 1 && widthOf(`${characters.join("")}\u2026`, true) > room)
    characters.pop();
  return `${characters.join("")}\u2026`;
}

/** The label of a node, as lines of [class, text]: one, or more where there is little room; where
 * it would be best, and its size. */
function label(node, total, last, width) {
  const x = node.x + THICK + SPACE,
    room = width - x;
  const parts = [["node-title", node.name], ["node-value", count(node.value)]];
  if (node.value !== total && (last || !narrow()))
    parts.push(["node-share", percent(node.value / total)]);
  const wide = (line) =>
    line.reduce((sum, [kind, text]) => sum + BETWEEN + widthOf(text, kind === "node-title"), 0);
  const [title, ...numbers] = parts;
  const lines = [parts];
  if (narrow() || wide(parts) > room) lines.splice(0, 1, [title], numbers);
  if (wide(numbers) > room) lines.splice(1, 1, ...numbers.map((one) => [one]));
  title[1] = cut(node.name, room - (lines.length > 1 ? BETWEEN : wide(numbers) + BETWEEN));
  return {
    node,
    lines,
    x,
    wide: Math.max(...lines.map(wide)),
    high: lines.length * LINE + 2,
    y: node.y + Math.max(node.size, 4) / 2 - (lines.length * LINE) / 2,
  };
}

/** Move labels down until none touches another one. */
function apart(labels) {
  const placed = [];
  for (const one of labels) {
    one.y = Math.max(0, one.y);
    let hit;
    const touches = (other) =>
      one.x < other.x + other.wide &&
      other.x < one.x + one.wide &&
      one.y < other.y + other.high &&
      other.y < one.y + one.high;
    while ((hit = placed.find(touches))) one.y = hit.y + hit.high;
    placed.push(one);
  }
}

function name({ node, lines, x, y }) {
  return svg(
    "text",
    { class: "node-name", x, y: y + LINE - 4 },
    lines[0][0][1] !== node.name && svg("title", {}, node.name),
    lines.flatMap((line, row) =>
      line.map(([kind, text], at) => {
        const place = at > 0 ? { dx: BETWEEN } : row > 0 ? { x, dy: LINE } : {};
        return svg("tspan", { class: kind, ...place }, text);
      }),
    ),
  );
}

/** On a phone the drawing has the width of the page, so that its words keep their size. */
const widthNow = () => (narrow() ? Math.max(280, Math.min(430, innerWidth - 30)) : 620);

export function flow({ title, unit, columns, links, width = widthNow() }) {
  const most = Math.max(...columns.map((column) => column.length));
  const tail = narrow() ? 130 : 205,
    gap = narrow() ? 2 * LINE + 2 : 20,
    least = Math.max(170, 60 + most * (gap + 14));
  const unitHeight = place(columns, least, 12, gap);
  const step = (width - tail) / Math.max(1, columns.length - 1);
  columns.forEach((column, at) =>
    column.forEach((node) => {
      node.x = at * step;
    }),
  );
  const total = columns[0].reduce((sum, node) => sum + node.value, 0);
  const nodes = columns.flat();
  const labels = columns.flatMap((column, at) =>
    column.map((node) => label(node, total, at === columns.length - 1, width)),
  );
  apart(labels);
  const height = Math.max(least, ...labels.map((one) => one.y + one.high));
  return figure({
    className: "flow",
    title,
    width,
    height,
    description: nodes.map((node) => `${node.name}: ${count(node.value)} ${unit}`).join("; "),
    drawing: [
      links.map((link) => ribbon(link, unitHeight)),
      nodes.map((node) =>
        svg("rect", {
          class: `node ${node.kind}`,
          x: node.x,
          y: node.y,
          width: THICK,
          height: Math.max(node.size, 1),
          rx: 1.5,
        }),
      ),
      labels.map(leader),
      labels.map(name),
    ],
    columns: [
      { name: "from", cell: (link) => link.from.name },
      { name: "to", cell: (link) => link.to.name },
      { name: unit, number: true, cell: (link) => count(link.value) },
    ],
    rows: links,
  });
}

/** From a node to its label, when that was moved away from it. */
function leader({ node, x, y, high }) {
  const from = node.y + Math.max(node.size, 4),
    middle = y + high / 2;
  if (middle <= from) return null;
  return svg("path", {
    class: "leader",
    d: `M${node.x + THICK / 2},${from}V${middle}H${x - 2}`,
  });
}
