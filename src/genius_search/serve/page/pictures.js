// Pictures of items (with the key where one is needed) and pictures that a person brings.

import { call, key } from "./api.js";
import { h } from "./elements.js";

const KEPT = 400;
const LARGE = 1_500_000;
const LONGEST_SIDE = 1024;
const fetched = new Map();

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
    if (fetched.size > KEPT) {
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

export const picturesIn = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
