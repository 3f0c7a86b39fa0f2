// Numbers as people read them.
//
// In: numbers.  Out: short strings.
// Promise: counts are exact, with separators; only bytes, shares and axis labels are rounded.

const COUNT = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SCALES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

export const count = (number) =>
  number === null || number === undefined ? "-" : COUNT.format(number);

export const plural = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;

export function bytes(number) {
  let left = number,
    unit = 0;
  while (left >= 1024 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit === 0 || left >= 100 ? Math.round(left) : left.toFixed(1)} ${UNITS[unit]}`;
}

export function percent(share, digits = 1) {
  if (share > 0 && share < 0.5 / 10 ** (digits + 2))
    return `< ${(1 / 10 ** digits).toFixed(digits)}%`;
  return `${(share * 100).toFixed(digits)}%`;
}

/** For axes: 1,200 is 1.2k. */
export function rough(number) {
  for (const [scale, letter] of SCALES) {
    if (Math.abs(number) >= scale) return `${Number((number / scale).toPrecision(3))}${letter}`;
  }
  return String(Number(number.toPrecision(3)));
}

export const range = (start, stop) => `${count(start)}..${count(stop)}`;

export const short = (hash) => (hash ? hash.slice(0, 12) : "unknown");
