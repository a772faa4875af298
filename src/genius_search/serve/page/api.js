// Calls to the server: the key goes along, and every failure becomes a Problem that says what to do. Pictures
// of items come from here too, and those that a person brings are made ready for it.

import { h } from "./elements.js";

const BLOBS_KEPT = 400;
const LARGE = 1_500_000;
const LONGEST_SIDE = 1024;
const fetched = new Map();
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

const TITLES = {
  400: "This cannot be read",
  401: "An API key is needed",
  403: "This key may not do that",
  404: "Not there",
  413: "Too large",
  422: "This cannot be done",
  429: "The server is busy",
  504: "That took too long",
};

async function problem(response) {
  const said = await response.json().catch(() => ({}));
  const title = TITLES[response.status] ?? said.title ?? `The server answered ${response.status}`;
  return new Problem({ ...said, status: response.status, title }, Number(response.headers.get("Retry-After")));
}

/** An item's picture. An <img> cannot send a key, so with one the bytes are fetched and kept as a blob. */
export function picture(path, alt, size = 256) {
  const image = h("img", { alt, loading: "lazy", decoding: "async", draggable: "false" });
  const failed = () => image.replaceWith(h("span", { class: "gone" }, "The picture cannot be shown"));
  image.addEventListener("error", failed);
  const address = new URL(path, location.origin);
  address.searchParams.set("size", size);
  if (key.get()) withKey(address).then((url) => (image.src = url), failed);
  else image.src = address;
  return image;
}

function withKey(address) {
  const name = address.href;
  if (!fetched.has(name)) {
    const url = call(address).then(async (response) => URL.createObjectURL(await response.blob()));
    url.catch(() => fetched.delete(name));
    fetched.set(name, url);
    if (fetched.size > BLOBS_KEPT) {
      const [oldest, old] = fetched.entries().next().value;
      fetched.delete(oldest);
      old.then(URL.revokeObjectURL, () => {});
    }
  }
  return fetched.get(name);
}

/** A brought picture as the server takes it. An encoder looks at a few hundred pixels, so a large one is shrunk to be searched with. */
export async function ready(file, { shrink }) {
  const isLarge = shrink && file.size > LARGE;
  if (!isLarge && file.type !== "image/avif") return file;
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return file; // the server says why it cannot be read
  const scale = isLarge ? Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height)) : 1;
  const canvas = h("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(blob ?? file), "image/jpeg", 0.92));
}

/** Browsers know some kinds of pictures, such as HEIC, by the name at best. */
export const isPicture = (file) => file.type.startsWith("image/") || /\.(hei[cf]|hif|avif)$/i.test(file.name);
