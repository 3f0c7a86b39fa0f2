// The server's JSON.
//
// In: a path under /api and its query.  Out: the answer, or an ApiError with the server's own
// words.
// Promise: a view that was left asks for nothing any more (its signal is aborted); nothing but
// this server is asked.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let leaving = new AbortController();

/** Drop every question of the view before. */
export function startView() {
  leaving.abort();
  leaving = new AbortController();
  return leaving.signal;
}

export const wasLeft = (error) => error instanceof DOMException && error.name === "AbortError";

async function ask(path, query, options) {
  const url = new URL(`api/${path}`, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  let answer;
  try {
    answer = await fetch(url, { cache: "no-store", ...options });
  } catch (error) {
    if (wasLeft(error)) throw error;
    throw new ApiError(
      `${url.pathname}: no answer (${error.message}). Is shardmill view still running? Start it again and retry.`,
      0,
    );
  }
  return read(answer, url.pathname);
}

async function read(answer, path) {
  const text = await answer.text();
  let found;
  try {
    found = text === "" ? {} : JSON.parse(text);
  } catch {
    throw new ApiError(
      `${path}: status ${answer.status} and no JSON: ${text.slice(0, 200)}`,
      answer.status,
    );
  }
  if (!answer.ok)
    throw new ApiError(found.error ?? `${path}: status ${answer.status}`, answer.status);
  return found;
}

export const get = (path, query = {}, signal = leaving.signal) => ask(path, query, { signal });

export const post = (path) =>
  ask(path, {}, { method: "POST", headers: { "X-Shardmill": "1" }, signal: leaving.signal });
