// Scales of charts.
//
// In: a range of numbers.  Out: round ticks; a path of pixels.
// Promise: ticks are 1, 2 or 5 times a power of ten, inside the range, about as many as asked for.

export function ticks(low, high, about = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step / 1e6; at += 1)
    found.push(at * step);
  return found;
}

export const scale = (low, high, from, to) => (value) =>
  high === low ? from : from + ((value - low) / (high - low)) * (to - from);
