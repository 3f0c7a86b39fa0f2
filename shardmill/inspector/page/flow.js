// Where everything went, as a flow from left to right.
//
// In: columns of nodes {name, value, kind}, and links {from, to, value} between neighbouring
// columns.
// Out: a figure.
// Promise: heights are in proportion, except that what is there is never thinner than two pixels;
// the numbers stand at every node and in the table.
// Not here: what a ledger means (ledger.js).

import { figure, narrow } from "./charts.js";
import { svg } from "./dom.js";
import { count, percent } from "./format.js";

const THICK = 10,
  GAP = 20,
  LEAST = 2;

function place(columns, height, top) {
  const most = Math.max(...columns.map((column) => column.length));
  const room = height - top - GAP * (most - 1) - 14;
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
      at += Math.max(node.size, 4) + GAP;
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

function name(node, total, last) {
  const x = node.x + THICK + 7;
  const middle = node.y + Math.max(node.size, 4) / 2;
  const share =
    node.value === total || (narrow() && !last) ? "" : ` ${percent(node.value / total)}`;
  return svg(
    "text",
    { class: "node-name", x, y: middle + 4 },
    svg("tspan", { class: "node-title" }, node.name),
    svg("tspan", { class: "node-value", dx: 6 }, count(node.value)),
    share && svg("tspan", { class: "node-share" }, share),
  );
}

export function flow({ title, unit, columns, links, width = narrow() ? 430 : 620 }) {
  const most = Math.max(...columns.map((column) => column.length));
  const height = Math.max(170, 60 + most * 34),
    tail = 205;
  const unitHeight = place(columns, height, 12);
  const step = (width - tail) / Math.max(1, columns.length - 1);
  columns.forEach((column, at) =>
    column.forEach((node) => {
      node.x = at * step;
    }),
  );
  const total = columns[0].reduce((sum, node) => sum + node.value, 0);
  const nodes = columns.flat();
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
      columns.map((column, at) =>
        column.map((node) => name(node, total, at === columns.length - 1)),
      ),
    ],
    columns: [
      { name: "from", cell: (link) => link.from.name },
      { name: "to", cell: (link) => link.to.name },
      { name: unit, number: true, cell: (link) => count(link.value) },
    ],
    rows: links,
  });
}
