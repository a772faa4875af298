// Calls to the server. Each call sends the API key, and each failure becomes a Problem. This module
// also loads the pictures of items, and prepares pictures of the user for sending.

const MAX_CACHED_PICTURES = 400;
const LARGE_BYTES = 1_500_000; // larger pictures are shrunk before a search
const MAX_SIDE = 1024; // of a shrunk picture, in pixels
const fetched = new Map(); // address of a picture -> promise of a blob URL, oldest first
const STORAGE_NAME = "genius-key";
let askForKey = async () => false;
let asking = null;

export const key = {
  get: () => sessionStorage.getItem(STORAGE_NAME),
  set: (value) =>
    value ? sessionStorage.setItem(STORAGE_NAME, value) : sessionStorage.removeItem(STORAGE_NAME),
};

/**
 * Set the function that asks the user for an API key. It resolves to whether there is a new key.
 */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** An error to show to the user, with the message of the server if it sent one. */
export class Problem extends Error {
  constructor(
    { status, title, detail, request_id: requestId, left_out: leftOut },
    retryAfter = null,
  ) {
    super((detail || title).replace(/^./u, (first) => first.toUpperCase()));
    this.status = status;
    this.title = title;
    this.requestId = requestId ?? null;
    this.leftOut = leftOut ?? null;
    this.retryAfter = retryAfter;
  }
}

/** Send a request, with JSON or with JSON and the files that it names; return the response. */
export async function call(path, { method = "GET", query = {}, json, files = {}, signal } = {}) {
  const address = new URL(path.replace(/^\//, ""), document.baseURI);
  for (const [name, value] of Object.entries(query))
    if (value !== null && value !== undefined) address.searchParams.set(name, value);
  const used = key.get();
  const isForm = Object.keys(files).length > 0;
  const response = await reach(address, {
    method,
    signal,
    headers: {
      ...(json === undefined || isForm ? {} : { "Content-Type": "application/json" }),
      ...(used ? { Authorization: `Bearer ${used}` } : {}),
    },
    body: isForm ? form(json, files) : json === undefined ? undefined : JSON.stringify(json),
  });
  if (response.status === 401 && (await wantKey(used)))
    return call(path, { method, query, json, files, signal });
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
    throw new Problem({
      status: 0,
      title: "The server does not answer",
      detail:
        "It may have been stopped, or the connection was lost. Start it with “genius serve” and try again.",
    });
  }
}

/** Ask for a key once, even if several concurrent calls were refused. */
function wantKey(used) {
  if (key.get() !== used) return true;
  asking ??= askForKey(used !== null).finally(() => (asking = null));
  return asking;
}

const TITLES = {
  400: "Invalid request",
  401: "API key required",
  403: "Not allowed",
  404: "Not found",
  413: "Too large",
  422: "Invalid input",
  429: "The server is busy",
  504: "The search took too long",
};

async function problem(response) {
  const details = await response.json().catch(() => ({}));
  const title =
    TITLES[response.status] ??
    details.title ??
    `The server responded with status ${response.status}`;
  return new Problem(
    { ...details, status: response.status, title },
    Number(response.headers.get("Retry-After")),
  );
}

/** Return the address of a picture of the service with its longer side at most `size` pixels. */
export function pictureAddress(path, size) {
  const address = new URL(path.replace(/^\//, ""), document.baseURI);
  if (size) address.searchParams.set("size", size);
  return address.href;
}

/** Fetch a file of the service with the key; return the address of its blob. */
export function pictureUrl(path, size) {
  const name = pictureAddress(path, size);
  if (!fetched.has(name)) {
    const url = call(name).then(async (response) => URL.createObjectURL(await response.blob()));
    url.catch(() => fetched.delete(name));
    fetched.set(name, url);
    if (fetched.size > MAX_CACHED_PICTURES) {
      const [oldest, old] = fetched.entries().next().value;
      fetched.delete(oldest);
      old.then(URL.revokeObjectURL, () => {});
    }
  }
  return fetched.get(name);
}

/**
 * Prepare a picture of the user for sending. An encoder reads a few hundred pixels per side, so a
 * large picture is shrunk for a search. AVIF, which the server refuses, becomes JPEG.
 */
export async function ready(file, { shrink }) {
  const isLarge = shrink && file.size > LARGE_BYTES;
  if (!isLarge && file.type !== "image/avif") return file;
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return file; // the server explains why it cannot be read
  const scale = isLarge ? Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height)) : 1;
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) =>
    canvas.toBlob((blob) => resolve(blob ?? file), "image/jpeg", 0.92),
  );
}

/**
 * Return whether a file is a picture. Browsers do not know the type of some formats, such as HEIC.
 */
export const isPicture = (file) =>
  file.type.startsWith("image/") || /\.(hei[cf]|hif|avif)$/i.test(file.name);
