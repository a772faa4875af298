// New items: drop files, look at them, name them, send them in parts small enough to be accepted.

import { ask, isPicture, ready } from "./api.js";
import { byId, count, h, icon, items, say, tell } from "./elements.js";
import { forgetAnswer } from "./results.js";
import { address, arrive, chosen, current, learnIndexes, START } from "./state.js";

const BYTES_AT_ONCE = 6_000_000;
const ITEMS_AT_ONCE = 8; // their texts have at most 240 kB
const MOST_TEXT = 10_000;
let waiting = [];
let drawn = false;

export function showAdd() {
  const place = byId("add");
  if (!chosen().writable) {
    drawn = false;
    place.replaceChildren(h("h1", { id: "add-title", tabindex: "-1" }, "Add items"), h("div", { class: "empty" }, h("h2", {}, "This index is read-only"), h("p", {}, "The server was started so that nothing can be added, or your key may only read.")));
    return;
  }
  if (drawn) return;
  drawn = true;
  const files = h("input", { id: "files", type: "file", multiple: true, accept: "image/*,.heic,.heif,.txt,.md", class: "unseen" });
  files.addEventListener("change", () => (take([...files.files]), (files.value = "")));
  const zone = h("label", { class: "zone", for: "files" }, icon("drop"), h("strong", {}, "Drop pictures and texts here"), h("span", { class: "fine" }, "or choose files. A .txt file with the name of a picture becomes its caption."), files);
  const words = h("textarea", { id: "words", rows: 2, maxlength: 4000, placeholder: "A text to be found" });
  const addText = () => {
    if (!words.value.trim()) return;
    waiting.push({ id: `text-${Date.now().toString(36)}`, text: words.value.trim(), file: null });
    words.value = "";
    redraw();
  };
  place.replaceChildren(
    h("h1", { id: "add-title", tabindex: "-1" }, "Add items"),
    h("p", { class: "lead" }, "New items can be found at once. An item with an existing name replaces the old one."),
    zone,
    h("div", { class: "row words" }, h("label", { for: "words" }, "Or write a text"), words, h("button", { type: "button", onclick: addText }, "Add to list")),
    h("div", { id: "waiting" }),
    h("div", { id: "added" }),
  );
  redraw();
}

/** Put files on the list of what is to be added. */
export async function take(files) {
  const stem = (file) => file.name.replace(/\.[^.]*$/, "");
  const texts = new Map();
  const amiss = [];
  for (const file of files.filter(isText)) {
    const text = (await file.text()).trim();
    if (text) texts.set(file.name, text.slice(0, MOST_TEXT));
    if (!text) amiss.push(`${file.name} is empty`);
    else if (text.length > MOST_TEXT) amiss.push(`${file.name} is cut after ${count(MOST_TEXT)} characters`);
  }
  for (const file of files.filter((one) => !isText(one))) {
    const caption = `${stem(file)}.txt`;
    if (!isPicture(file)) amiss.push(`${file.name} is neither a picture nor a .txt or .md file`);
    else if (!chosen().reads_images) amiss.push(`${file.name} is a picture, and this index reads only texts`);
    else {
      waiting = waiting.filter((one) => one.id !== file.name);
      waiting.push({ id: file.name, text: texts.get(caption) ?? "", file, url: URL.createObjectURL(file) });
      texts.delete(caption);
    }
  }
  for (const [id, text] of texts) waiting.push({ id, text, file: null });
  redraw();
  if (amiss.length) tell({ status: 0, title: "Left out or cut", message: `${amiss.slice(0, 5).join("; ")}${amiss.length > 5 ? `; and ${amiss.length - 5} more` : ""}.` });
  byId("send")?.focus();
}

const isText = (file) => file.type === "text/plain" || /\.(txt|md)$/i.test(file.name);

function redraw() {
  const place = byId("waiting");
  if (!waiting.length) {
    place.replaceChildren();
    return;
  }
  const send = h("button", { type: "button", class: "primary", id: "send", onclick: sendAll }, `Add ${items(waiting.length)}`);
  const clear = () => {
    waiting = [];
    redraw();
  };
  place.replaceChildren(
    h("div", { class: "actions" }, send, h("button", { type: "button", onclick: clear }, "Clear")),
    h("ul", { class: "waiting", "aria-label": "To be added" }, waiting.map(row)),
  );
  say(`${items(waiting.length)} to be added.`);
}

function row(one) {
  const input = (label, name, placeholder) => {
    const field = h("input", { type: "text", "aria-label": `${label} of ${one.id}`, value: one[name], placeholder, maxlength: name === "id" ? 500 : MOST_TEXT });
    field.addEventListener("change", () => (one[name] = field.value.trim() || (name === "id" ? one.id : "")));
    return field;
  };
  const drop = () => {
    waiting = waiting.filter((other) => other !== one);
    redraw();
  };
  return h(
    "li",
    {},
    h("span", { class: "frame" }, one.url ? h("img", { src: one.url, alt: "", onerror: (event) => event.target.remove() }) : h("span", { class: "snippet" }, "Text")),
    h("span", { class: "entries" }, input("Name", "id", "name"), input("Text", "text", one.file ? "caption, if it has one" : "text")),
    h("button", { type: "button", class: "icon", "aria-label": `Leave out ${one.id}`, onclick: drop }, icon("close")),
  );
}

/** Parts of at most so many items and bytes, in order. */
function inParts() {
  const parts = [[]];
  for (const one of waiting) {
    const bytes = parts.at(-1).reduce((sum, { file }) => sum + (file?.size ?? 0), one.file?.size ?? 0);
    const isFull = bytes > BYTES_AT_ONCE || parts.at(-1).length >= ITEMS_AT_ONCE;
    if (isFull && parts.at(-1).length) parts.push([]);
    parts.at(-1).push(one);
  }
  return parts;
}

async function sendAll() {
  const total = waiting.length;
  const sum = { added: 0, replaced: 0, unchanged: 0, left_out: [] };
  const ids = [];
  const bar = h("progress", { max: total, value: 0, "aria-label": "Items added" });
  byId("waiting").querySelector(".actions").replaceChildren(bar, h("span", { class: "fine" }, "Adding …"));
  for (const part of inParts()) {
    try {
      const files = {};
      for (const [at, one] of part.entries()) if (one.file) files[`picture-${at}`] = await ready(one.file, { shrink: false });
      const sent = part.map((one, at) => ({ id: one.id, text: one.text || undefined, image: one.file ? `picture-${at}` : undefined }));
      const done = await ask("/v1/items", { method: "POST", query: { index: chosen().name }, json: { items: sent }, files });
      for (const name of ["added", "replaced", "unchanged"]) sum[name] += done[name];
      sum.left_out.push(...done.left_out);
      const out = new Set(done.left_out.map((one) => one.id));
      ids.push(...part.map((one) => one.id).filter((id) => !out.has(id)));
    } catch (problem) {
      if (!problem.leftOut) {
        redraw();
        tell(problem, sendAll);
        break;
      }
      sum.left_out.push(...problem.leftOut);
    }
    for (const one of part) if (one.url) URL.revokeObjectURL(one.url);
    waiting = waiting.filter((one) => !part.includes(one));
    bar.value = total - waiting.length;
  }
  forgetAnswer();
  redraw();
  drawOutcome(sum, ids);
  await learnIndexes().then(() => arrive(current()), tell);
}

function drawOutcome(sum, ids) {
  const said = [sum.added && `${items(sum.added)} added`, sum.replaced && `${count(sum.replaced)} of them in place of another`, sum.unchanged && `${count(sum.unchanged)} here already`].filter(Boolean).join(", ");
  if (!said && !sum.left_out.length) return;
  const find = ids.length > 0 && h("p", { class: "actions" }, h("a", { class: "button", href: address({ ...START, index: chosen().name, parts: [{ value: ids[0], weight: 1 }] }) }, ids.length === 1 ? "Find it, and what is like it" : "Find the first, and what is like it"));
  byId("added").replaceChildren(
    said ? h("div", { class: "notice good" }, h("strong", {}, said), find) : "",
    sum.left_out.length ? h("div", { class: said ? "notice warn" : "notice" }, h("strong", {}, `${items(sum.left_out.length)} left out`), h("ul", {}, sum.left_out.map((one) => h("li", {}, h("b", {}, one.id), `: ${one.reason}`)))) : "",
  );
  say(`${said || "Nothing was added"}. ${sum.left_out.length ? `${sum.left_out.length} left out.` : ""}`);
}
