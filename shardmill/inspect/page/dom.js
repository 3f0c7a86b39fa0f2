// Elements made with DOM calls alone.
//
// In: a tag, what it has, its children.  Out: the element.
// Promise: strings become text nodes and attribute values, never markup; null children are left
// out.
// Not here: what is shown.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, has, children) {
  for (const [name, value] of Object.entries(has)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on")
      for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else if (name === "css")
      for (const [key, set] of Object.entries(value)) made.style.setProperty(key, set);
    else if (name === "value") made.value = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  add(made, children);
  return made;
}

export function add(parent, children) {
  for (const child of [children].flat(4)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return parent;
}

export const el = (tag, has = {}, ...children) => fill(document.createElement(tag), has, children);

export const svg = (tag, has = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), has, children);

export function show(place, ...children) {
  place.replaceChildren();
  return add(place, children);
}

export const button = (text, call, has = {}) =>
  el("button", { type: "button", ...has, on: { click: call } }, text);

export const link = (text, href, has = {}) => el("a", { href, ...has }, text);

export const section = (title, ...children) => el("section", {}, el("h2", {}, title), ...children);

let made = 0;
export const freshId = (word) => `${word}-${++made}`;

/** Tell a screen reader what changed. */
export function announce(text) {
  document.getElementById("live").textContent = text;
}
