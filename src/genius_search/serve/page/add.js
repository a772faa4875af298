// The form for new items: drop files, review and name them, and send them in small batches.

import { ask, isPicture, ready } from "./api.js";
import { count, Icon, IconButton, items, say } from "./elements.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import {
  address, arrive, chosen, current, itemsChanged, learnIndexes, notify, START,
} from "./state.js";

const MAX_BATCH_BYTES = 6_000_000;
const MAX_BATCH_ITEMS = 8; // their texts have at most 240 kB of UTF-8, less than the limit for JSON
const MAX_TEXT_LENGTH = 10_000;
let waiting = []; // items to add
let progress = null; // number of items that were sent, while they are sent
let outcome = null; // of the last items that were sent
let redraw = () => {};

/** Replace the list of items to add. */
function setWaiting(list) {
  waiting = list;
  redraw();
}

export function AddView() {
  const [, setDrawn] = useState(0);
  useEffect(() => {
    redraw = () => setDrawn((drawn) => drawn + 1);
    return () => (redraw = () => {});
  }, []);
  if (!chosen().writable)
    return html`
      <h1 id="add-title" tabindex="-1">Add items</h1>
      <div class="empty">
        <h2>This index is read-only</h2>
        <p>Your API key does not allow changes.</p>
      </div>
    `;
  const choose = ({ target }) => {
    take([...target.files]);
    target.value = "";
  };
  return html`
    <h1 id="add-title" tabindex="-1">Add items</h1>
    <p class="lead">
      New items can be found immediately. An item with the name of an existing item replaces it.
    </p>
    <label class="zone" for="files">
      <${Icon} name="drop" />
      <strong>Drop pictures and texts here</strong>
      <span class="fine">
        or choose files. A .txt file with the name of a picture becomes its caption.
      </span>
      <input
        id="files"
        type="file"
        multiple
        accept="image/*,.heic,.heif,.txt,.md"
        class="unseen"
        onChange=${choose}
      />
    </label>
    <${WrittenText} />
    <div id="waiting">${waiting.length > 0 && html`<${Waiting} />`}</div>
    <div id="added">${outcome && html`<${Outcome} ...${outcome} />`}</div>
  `;
}

function WrittenText() {
  const words = useRef(null);
  const add = () => {
    const text = words.current.value.trim();
    if (!text) return;
    setWaiting([...waiting, { id: `text-${Date.now().toString(36)}`, text, file: null }]);
    words.current.value = "";
  };
  return html`
    <div class="row words">
      <label for="words">Or write a text</label>
      <textarea id="words" ref=${words} rows="2" maxlength="4000" placeholder="Text of the item" />
      <button type="button" onClick=${add}>Add to list</button>
    </div>
  `;
}

/**
 * Add files to the list of new items. A text file with the name of a picture becomes its caption.
 */
export async function take(files) {
  const problems = [];
  const texts = await readTexts(files.filter(isText), problems);
  const added = [];
  for (const file of files.filter((other) => !isText(other))) {
    const caption = `${file.name.replace(/\.[^.]*$/, "")}.txt`;
    if (!isPicture(file)) problems.push(`${file.name} is neither a picture nor a .txt or .md file`);
    else if (!chosen().reads_images)
      problems.push(`${file.name} is a picture, but this index accepts only texts`);
    else {
      const url = URL.createObjectURL(file);
      added.push({ id: file.name, text: texts.get(caption) ?? "", file, url });
      texts.delete(caption);
    }
  }
  for (const [id, text] of texts) added.push({ id, text, file: null });
  const ids = new Set(added.map(({ id }) => id));
  setWaiting([...waiting.filter(({ id }) => !ids.has(id)), ...added]);
  say(`${items(waiting.length)} ready to add.`);
  const further = problems.length > 5 ? `; and ${problems.length - 5} more` : "";
  const message = `${problems.slice(0, 5).join("; ")}${further}.`;
  if (problems.length) notify({ status: 0, title: "Some files were left out or cut", message });
  setTimeout(() => document.getElementById("send")?.focus());
}

/** Return the texts of files by their names. */
async function readTexts(files, problems) {
  const texts = new Map();
  for (const file of files) {
    const text = (await file.text()).trim();
    if (text) texts.set(file.name, text.slice(0, MAX_TEXT_LENGTH));
    else problems.push(`${file.name} is empty`);
    if (text.length > MAX_TEXT_LENGTH)
      problems.push(`${file.name} was cut after ${count(MAX_TEXT_LENGTH)} characters`);
  }
  return texts;
}

const isText = (file) => file.type === "text/plain" || /\.(txt|md)$/i.test(file.name);

function Waiting() {
  return html`
    <div class="actions">
      ${progress === null
        ? html`
            <button type="button" class="primary" id="send" onClick=${sendAll}>
              Add ${items(waiting.length)}
            </button>
            <button type="button" onClick=${() => setWaiting([])}>Clear</button>
          `
        : html`
            <progress max=${progress + waiting.length} value=${progress} aria-label="Items added" />
            <span class="fine">Adding …</span>
          `}
    </div>
    <ul class="waiting" aria-label="Items to add">
      ${waiting.map((item) => html`<${WaitingItem} key=${item.url ?? item.id} item=${item} />`)}
    </ul>
  `;
}

function WaitingItem({ item }) {
  const [isBroken, setBroken] = useState(false);
  const { current: initialName } = useRef(item.id);
  const entry = (label, name, placeholder) => html`
    <input
      type="text"
      aria-label=${`${label} of ${initialName}`}
      value=${item[name]}
      placeholder=${placeholder}
      maxlength=${name === "id" ? 500 : MAX_TEXT_LENGTH}
      onChange=${({ target }) =>
        (item[name] = target.value.trim() || (name === "id" ? item.id : ""))}
    />
  `;
  return html`
    <li>
      <span class="frame">
        ${item.url && !isBroken
          ? html`<img src=${item.url} alt="" onError=${() => setBroken(true)} />`
          : !item.url && html`<span class="snippet">Text</span>`}
      </span>
      <span class="entries">
        ${entry("Name", "id", "name")}
        ${entry("Text", "text", item.file ? "caption (optional)" : "text")}
      </span>
      <${IconButton}
        name="close"
        label=${`Remove ${initialName}`}
        onClick=${() => setWaiting(waiting.filter((other) => other !== item))}
      />
    </li>
  `;
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
  const sum = { added: 0, replaced: 0, unchanged: 0, leftOut: [], ids: [] };
  let refusal = null;
  progress = 0;
  redraw();
  for (const batch of toBatches()) {
    try {
      addTo(sum, batch, await send(batch));
    } catch (problem) {
      if (!problem.leftOut) {
        refusal = problem;
        break;
      }
      sum.leftOut.push(...problem.leftOut);
    }
    for (const { url } of batch) if (url) URL.revokeObjectURL(url);
    progress += batch.length;
    setWaiting(waiting.filter((item) => !batch.includes(item)));
  }
  progress = null;
  outcome = { ...sum, summary: summarize(sum) };
  itemsChanged();
  await learnIndexes().then(() => arrive(current()), notify);
  if (refusal) notify(refusal, sendAll);
  const { summary, leftOut } = outcome;
  say(`${summary || "Nothing was added"}. ${leftOut.length ? `${leftOut.length} left out.` : ""}`);
}

/** Send items and their pictures in one request. */
async function send(batch) {
  const files = {};
  for (const [number, item] of batch.entries())
    if (item.file) files[`picture-${number}`] = await ready(item.file, { shrink: false });
  const newItems = batch.map((item, number) => ({
    id: item.id,
    text: item.text || undefined,
    image: item.file ? `picture-${number}` : undefined,
  }));
  const query = { index: chosen().name };
  return ask("v1/items", { method: "POST", query, json: { items: newItems }, files });
}

/** Add the answer for a batch to the sum. */
function addTo(sum, batch, result) {
  for (const name of ["added", "replaced", "unchanged"]) sum[name] += result[name];
  sum.leftOut.push(...result.left_out);
  const leftOut = new Set(result.left_out.map(({ id }) => id));
  sum.ids.push(...batch.map(({ id }) => id).filter((id) => !leftOut.has(id)));
}

const summarize = ({ added, replaced, unchanged }) =>
  [
    added && `${items(added)} added`,
    replaced && `${count(replaced)} replaced`,
    unchanged && `${count(unchanged)} unchanged`,
  ]
    .filter(Boolean)
    .join(", ");

function Outcome({ summary, leftOut, ids }) {
  const similar = { ...START, index: chosen().name, parts: [{ value: ids[0], weight: 1 }] };
  return html`
    ${summary &&
    html`<div class="notice good">
      <strong>${summary}</strong>
      ${ids.length > 0 &&
      html`<p class="actions">
        <a class="button" href=${address(similar)}>
          ${ids.length === 1 ? "Show it and similar items" : "Show the first and similar items"}
        </a>
      </p>`}
    </div>`}
    ${leftOut.length > 0 &&
    html`<div class=${summary ? "notice warn" : "notice"}>
      <strong>${items(leftOut.length)} left out</strong>
      <ul>
        ${leftOut.map(({ id, reason }) => html`<li key=${id}><b>${id}</b>: ${reason}</li>`)}
      </ul>
    </div>`}
  `;
}
