// A packed row as a bar.
//
// In: a row of a plan.  Out: an SVG.
// Promise: pieces and waste are in proportion to their places, and differ by more than colour.

import { svg } from "./dom.js";
import { count, plural } from "./format.js";

/** One row as a bar, a thousand units wide. */
export function bar({ row, used, room, pieces }, height = 14) {
  const unit = 1000 / room;
  return svg(
    "svg",
    {
      class: "packed-bar",
      role: "img",
      viewBox: `0 0 1000 ${height}`,
      preserveAspectRatio: "none",
      "aria-label": `row ${row}: ${count(used)} of ${count(room)} places used by ${plural(pieces.length, "piece")}`,
    },
    svg("rect", { class: "waste", width: 1000, height }),
    pieces.map((piece, at) =>
      svg(
        "rect",
        {
          class: at % 2 ? "piece odd" : "piece",
          x: piece.place * unit,
          width: Math.max(1, piece.length * unit - 1.5),
          height,
        },
        svg(
          "title",
          {},
          `example ${count(piece.example)}: ${count(piece.length)} tokens at ${count(piece.place)}`,
        ),
      ),
    ),
  );
}
