// Text in which everything can be seen.
//
// In: a string of the data.  Out: nodes: text, and small labels for what has no glyph.
// Promise: every character is shown once, in order; controls, bidi controls, zero width characters
// and odd spaces are labels (U+202E), never themselves, so no text can reorder or hide what is
// around it.
// Not here: tokens and their boxes.

import { el } from "./dom.js";

const CLASSES = String.raw`\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}`;
const SPACES = String.raw`\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000`;
const FILLERS = String.raw`\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u{e0100}-\u{e01ef}`;
const HIDDEN = new RegExp(`[${CLASSES}${SPACES}${FILLERS}]`, "gu");
const SPACED = new RegExp(`[ ${CLASSES}${SPACES}${FILLERS}]`, "gu");
const NAMES = {
  0x00: "NUL",
  0x07: "BEL",
  0x08: "BS",
  0x0b: "VT",
  0x0c: "FF",
  0x0d: "CR",
  0x1b: "ESC",
  0x7f: "DEL",
  0xa0: "NBSP",
  0xad: "SHY",
  0x200b: "ZWSP",
  0x200c: "ZWNJ",
  0x200d: "ZWJ",
  0xfeff: "BOM",
};

export const codePoint = (character) =>
  `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

export const label = (character) => NAMES[character.codePointAt(0)] ?? codePoint(character);

function mark(character, spaces) {
  if (character === " ") return el("span", { class: "space" }, "\u00b7");
  if (character === "\n") return el("span", { class: "space" }, "\u21b5");
  if (character === "\t") return el("span", { class: "space" }, "\u2192", spaces ? "" : "\t");
  return el("span", { class: "control", title: codePoint(character) }, label(character));
}

/** Nodes of one text. `spaces`: also spaces and line breaks are signs. */
export function visible(text, { spaces = false } = {}) {
  const wanted = spaces ? SPACED : HIDDEN;
  wanted.lastIndex = 0;
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(wanted)) {
    if (!spaces && found[0] === "\n") continue;
    if (found.index > from) nodes.push(document.createTextNode(text.slice(from, found.index)));
    nodes.push(mark(found[0], spaces));
    from = found.index + found[0].length;
  }
  if (from < text.length) nodes.push(document.createTextNode(text.slice(from)));
  return nodes;
}

/** The same as a string, for labels and titles. */
export const spoken = (text) =>
  text.replace(SPACED, (character) =>
    character === " "
      ? "\u00b7"
      : character === "\n"
        ? "\u21b5"
        : character === "\t"
          ? "\u2192"
          : `[${label(character)}]`,
  );

/** One line for lists: line breaks and tabs become single signs, the rest as in `visible`. */
export const oneLine = (text) => visible(text.replace(/\s*\n\s*/g, " \u21b5 ").replace(/\t/g, " "));
