// The form for new items: drop files, review and name them, and send them in small batches.

import { ask, isPicture, ready } from "./api.js";
import { byId, count, h, icon, items, say, tell } from "./elements.js";
import { forgetAnswer } from "./results.js";
import { address, arrive, chosen, current, learnIndexes, START } from "./state.js";

const MAX_BATCH_BYTES = 6_000_000;
const MAX_BATCH_ITEMS = 8; // their texts have at most 240 kB of UTF-8, less than the limit for JSON
const MAX_TEXT_LENGTH = 10_000;
let waiting = [];
let drawn = false;

export function showAdd() {
  const place = byId("add");
  if (!chosen().writable) {
    drawn = false;
    place.replaceChildren(
      h("h1", { id: "add-title", tabindex: "-1" }, "Add items"),
      h(
        "div",
        { class: "empty" },
        h("h2", {}, "This index is read-only"),
        h("p", {}, "Your API key does not allow changes."),
      ),
    );
    return;
  }
  if (drawn) return;
  drawn = true;
  const files = h("input", {
    id: "files",
    type: "file",
    multiple: true,
    accept: "image/*,.heic,.heif,.txt,.md",
    class: "unseen",
  });
  files.addEventListener("change", () => (take([...files.files]), (files.value = "")));
  const zone = h(
    "label",
    { class: "zone", for: "files" },
    icon("drop"),
    h("strong", {}, "Drop pictures and texts here"),
    h(
      "span",
      { class: "fine" },
      "or choose files. A .txt file with the name of a picture becomes its caption.",
    ),
    files,
  );
  const words = h("textarea", {
    id: "words",
    rows: 2,
    maxlength: 4000,
    placeholder: "Text of the new item",
  });
  const addText = () => {
    if (!words.value.trim()) return;
    waiting.push({ id: `text-${Date.now().toString(36)}`, text: words.value.trim(), file: null });
    words.value = "";
    redraw();
  };
  place.replaceChildren(
    h("h1", { id: "add-title", tabindex: "-1" }, "Add items"),
    h(
      "p",
      { class: "lead" },
      "New items can be found immediately. An item with the name of an existing item replaces it.",
    ),
    zone,
    h(
      "div",
      { class: "row words" },
      h("label", { for: "words" }, "Or write a text"),
      words,
      h("button", { type: "button", onclick: addText }, "Add to list"),
    ),
    h("div", { id: "waiting" }),
    h("div", { id: "added" }),
  );
  redraw();
}

/**
 * Add files to the list of new items. A text file with the name of a picture becomes its caption.
 */
export async function take(files) {
  const stem = (file) => file.name.replace(/\.[^.]*$/, "");
  const texts = new Map();
  const problems = [];
  for (const file of files.filter(isText)) {
    const text = (await file.text()).trim();
    if (text) texts.set(file.name, text.slice(0, MAX_TEXT_LENGTH));
    if (!text) problems.push(`${file.name} is empty`);
    else if (text.length > MAX_TEXT_LENGTH)
      problems.push(`${file.name} was cut after ${count(MAX_TEXT_LENGTH)} characters`);
  }
  for (const file of files.filter((other) => !isText(other))) {
    const caption = `${stem(file)}.txt`;
    if (!isPicture(file)) problems.push(`${file.name} is neither a picture nor a .txt or .md file`);
    else if (!chosen().reads_images)
      problems.push(`${file.name} is a picture, but this index accepts only texts`);
    else {
      waiting = waiting.filter((item) => item.id !== file.name);
      waiting.push({
        id: file.name,
        text: texts.get(caption) ?? "",
        file,
        url: URL.createObjectURL(file),
      });
      texts.delete(caption);
    }
  }
  for (const [id, text] of texts) waiting.push({ id, text, file: null });
  redraw();
  if (problems.length)
    tell({
      status: 0,
      title: "Some files were left out or cut",
      message: `${problems.slice(0, 5).join("; ")}${problems.length > 5 ? `; and ${problems.length - 5} more` : ""}.`,
    });
  byId("send")?.focus();
}

const isText = (file) => file.type === "text/plain" || /\.(txt|md)$/i.test(file.name);

function redraw() {
  const place = byId("waiting");
  if (!waiting.length) {
    place.replaceChildren();
    return;
  }
  const send = h(
    "button",
    { type: "button", class: "primary", id: "send", onclick: sendAll },
    `Add ${items(waiting.length)}`,
  );
  const clear = () => {
    waiting = [];
    redraw();
  };
  place.replaceChildren(
    h("div", { class: "actions" }, send, h("button", { type: "button", onclick: clear }, "Clear")),
    h("ul", { class: "waiting", "aria-label": "Items to add" }, waiting.map(row)),
  );
  say(`${items(waiting.length)} ready to add.`);
}

function row(item) {
  const input = (label, name, placeholder) => {
    const field = h("input", {
      type: "text",
      "aria-label": `${label} of ${item.id}`,
      value: item[name],
      placeholder,
      maxlength: name === "id" ? 500 : MAX_TEXT_LENGTH,
    });
    field.addEventListener(
      "change",
      () => (item[name] = field.value.trim() || (name === "id" ? item.id : "")),
    );
    return field;
  };
  const drop = () => {
    waiting = waiting.filter((other) => other !== item);
    redraw();
  };
  return h(
    "li",
    {},
    h(
      "span",
      { class: "frame" },
      item.url
        ? h("img", { src: item.url, alt: "", onerror: (event) => event.target.remove() })
        : h("span", { class: "snippet" }, "Text"),
    ),
    h(
      "span",
      { class: "entries" },
      input("Name", "id", "name"),
      input("Text", "text", item.file ? "caption (optional)" : "text"),
    ),
    h(
      "button",
      { type: "button", class: "icon", "aria-label": `Remove ${item.id}`, onclick: drop },
      icon("close"),
    ),
  );
}

/** Divide the list into batches that the server accepts, in order. */
function toBatches() {
  const batches = [[]];
  for (const item of waiting) {
    const batch = batches.at(-1);
    const bytes = batch.reduce((sum, { file }) => sum + (file?.size ?? 0), item.file?.size ?? 0);
    const isFull = bytes > MAX_BATCH_BYTES || batch.length >= MAX_BATCH_ITEMS;
    if (isFull && batch.length) batches.push([item]);
    else batch.push(item);
  }
  return batches;
}

async function sendAll() {
  const total = waiting.length;
  const sum = { added: 0, replaced: 0, unchanged: 0, left_out: [] };
  const ids = [];
  const bar = h("progress", { max: total, value: 0, "aria-label": "Items added" });
  byId("waiting")
    .querySelector(".actions")
    .replaceChildren(bar, h("span", { class: "fine" }, "Adding …"));
  for (const batch of toBatches()) {
    try {
      const files = {};
      for (const [number, item] of batch.entries())
        if (item.file) files[`picture-${number}`] = await ready(item.file, { shrink: false });
      const newItems = batch.map((item, number) => ({
        id: item.id,
        text: item.text || undefined,
        image: item.file ? `picture-${number}` : undefined,
      }));
      const result = await ask("v1/items", {
        method: "POST",
        query: { index: chosen().name },
        json: { items: newItems },
        files,
      });
      for (const name of ["added", "replaced", "unchanged"]) sum[name] += result[name];
      sum.left_out.push(...result.left_out);
      const leftOut = new Set(result.left_out.map(({ id }) => id));
      ids.push(...batch.map(({ id }) => id).filter((id) => !leftOut.has(id)));
    } catch (problem) {
      if (!problem.leftOut) {
        redraw();
        tell(problem, sendAll);
        break;
      }
      sum.left_out.push(...problem.leftOut);
    }
    for (const { url } of batch) if (url) URL.revokeObjectURL(url);
    waiting = waiting.filter((item) => !batch.includes(item));
    bar.value = total - waiting.length;
  }
  forgetAnswer();
  redraw();
  drawOutcome(sum, ids);
  await learnIndexes().then(() => arrive(current()), tell);
}

function drawOutcome(sum, ids) {
  const summary = [
    sum.added && `${items(sum.added)} added`,
    sum.replaced && `${count(sum.replaced)} replaced`,
    sum.unchanged && `${count(sum.unchanged)} unchanged`,
  ]
    .filter(Boolean)
    .join(", ");
  if (!summary && !sum.left_out.length) return;
  const find =
    ids.length > 0 &&
    h(
      "p",
      { class: "actions" },
      h(
        "a",
        {
          class: "button",
          href: address({ ...START, index: chosen().name, parts: [{ value: ids[0], weight: 1 }] }),
        },
        ids.length === 1 ? "Show it and similar items" : "Show the first and similar items",
      ),
    );
  byId("added").replaceChildren(
    summary ? h("div", { class: "notice good" }, h("strong", {}, summary), find) : "",
    sum.left_out.length
      ? h(
          "div",
          { class: summary ? "notice warn" : "notice" },
          h("strong", {}, `${items(sum.left_out.length)} left out`),
          h(
            "ul",
            {},
            sum.left_out.map(({ id, reason }) => h("li", {}, h("b", {}, id), `: ${reason}`)),
          ),
        )
      : "",
  );
  say(
    `${summary || "Nothing was added"}. ${sum.left_out.length ? `${sum.left_out.length} left out.` : ""}`,
  );
}
