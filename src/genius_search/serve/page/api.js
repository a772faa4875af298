// Calls to the server: the key goes along, and every failure becomes a Problem that says what to do.

const KEPT = "genius-key";
let askForKey = async () => false;
let asking = null;

export const key = {
  get: () => sessionStorage.getItem(KEPT),
  set: (value) => (value ? sessionStorage.setItem(KEPT, value) : sessionStorage.removeItem(KEPT)),
};

/** What to do when the server wants a key: resolves to whether there is a new one. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** What went wrong, in the server's words where it had some. */
export class Problem extends Error {
  constructor({ status, title, detail, request_id: requestId, left_out: leftOut }, retryAfter = null) {
    super((detail || title).replace(/^./u, (first) => first.toUpperCase()));
    this.status = status;
    this.title = title;
    this.requestId = requestId ?? null;
    this.leftOut = leftOut ?? null;
    this.retryAfter = retryAfter;
  }
}

/** A request, with a body of JSON, or of JSON and the files that it names. */
export async function call(path, { method = "GET", query = {}, json, files = {}, signal } = {}) {
  const address = new URL(path, location.origin);
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== undefined) address.searchParams.set(name, value);
  const used = key.get();
  const isForm = Object.keys(files).length > 0;
  const response = await reach(address, {
    method,
    signal,
    headers: { ...(json === undefined || isForm ? {} : { "Content-Type": "application/json" }), ...(used ? { Authorization: `Bearer ${used}` } : {}) },
    body: isForm ? form(json, files) : json === undefined ? undefined : JSON.stringify(json),
  });
  if (response.status === 401 && (await wantKey(used))) return call(path, { method, query, json, files, signal });
  if (!response.ok) throw await problem(response);
  return response;
}

function form(json, files) {
  const parts = new FormData();
  parts.append("json", JSON.stringify(json));
  for (const [name, file] of Object.entries(files)) parts.append(name, file);
  return parts;
}

export const ask = async (path, options) => (await call(path, options)).json();

async function reach(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ status: 0, title: "The server does not answer", detail: "It may have been stopped, or the connection is gone. Start it with “genius serve”, then try again." });
  }
}

/** Many calls may find out at once that the key is wrong; the person is asked once. */
function wantKey(used) {
  if (key.get() !== used) return true;
  asking ??= askForKey(used !== null).finally(() => (asking = null));
  return asking;
}

async function problem(response) {
  const said = await response.json().catch(() => ({}));
  const seconds = Number.parseFloat(response.headers.get("Retry-After"));
  return new Problem(
    {
      status: response.status,
      title: said.title || TITLES[response.status] || `The server answered ${response.status}`,
      detail: typeof said.detail === "string" ? said.detail : undefined,
      request_id: said.request_id ?? response.headers.get("X-Request-ID"),
      left_out: said.left_out,
    },
    Number.isFinite(seconds) ? seconds : null,
  );
}

const TITLES = { 401: "An API key is needed", 403: "This key may not do that", 404: "Not there", 413: "Too large", 429: "The server is busy", 503: "The server is shutting down", 504: "That took too long" };
