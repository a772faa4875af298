// The state of the page. It is encoded in the address, so that a search can be shared, and Back
// works. Only a picture of the user is not in the address: it stays in this tab, and entries of the
// history refer to it.

import { ask } from "./api.js";

export const START = Object.freeze({
  view: "search",
  index: null,
  text: "",
  picture: null,
  parts: [],
  instruction: "",
  modality: "",
  order: "", // "newest" or "oldest"; by match or, without a query, "newest" if empty
  date: "", // the field with the date; the first of the index if empty
  month: "", // where the timeline begins: 2024-05
  stack: "", // "no" shows near-duplicates one by one
  k: 20,
  shown: null, // number of hits after “Show more”
  beam: null,
  rerank: "",
  where: [],
  match: "",
  item: null,
});

const DATE_FIELDS = ["taken", "date", "created", "published", "sent", "modified", "time", "day"];
const brought = new Map();
let state = START;
let indexes = [];
let listed = { items: [], more: null };
let edition = 0;
let notice = null;
let show = () => {};

/** Set the function that draws the page. */
export function onShow(draws) {
  show = draws;
}

export const current = () => state;
export const allIndexes = () => indexes;

/** Return the number of changes of items; a request is sent again if it has changed. */
export const currentEdition = () => edition;
export const itemsChanged = () => (edition += 1);

/** Return the selected index. */
export const chosen = () => indexes.find((index) => index.name === state.index) ?? indexes[0];

/** Return the fields of the index with dates. */
export const dateFields = () => DATE_FIELDS.filter((name) => chosen().fields.includes(name));

/** Return the field with the date that items are sorted by, or null. */
export const dateField = () =>
  dateFields().find((name) => name === state.date) ?? dateFields()[0] ?? null;

/** Change the state and the address, and draw the page. */
export function go(changes, { replace = false, opened = false } = {}) {
  const next = { ...state, ...changes };
  history[replace ? "replaceState" : "pushState"](
    { picture: next.picture, opened: opened || (replace && history.state?.opened) },
    "",
    address(next),
  );
  arrive(next);
}

/** Draw the page in a state. Before the indexes are loaded, it is only stored. */
export function arrive(next) {
  const before = state;
  state = next;
  notice = null;
  if (indexes.length) show(before);
}

/** Show a problem above the page until its state changes; `again` repeats the failed action. */
export function notify(problem, again = null) {
  if (problem.name === "AbortError") return;
  if (problem.status === undefined) throw problem; // a bug of this page, for the console
  notice = { problem, again: again && (() => ((notice = null), show(state), again())) };
  show(state);
}
export const currentNotice = () => notice;

/** Close the viewer: go back if it was opened from this page, or remove it from the address. */
export function closeItem() {
  if (!state.item) return;
  if (history.state?.opened) history.back();
  else go({ item: null }, { replace: true });
}

/** Load the descriptions of the indexes; their counts change with the items. */
export async function learnIndexes() {
  indexes = (await ask("v1/indexes")).indexes;
}

/** Store the items that are shown in their order, for the viewer; `more` loads the next ones. */
export function list(items, more = null) {
  const isLonger = items.length !== listed.items.length;
  listed = { items, more };
  if (isLonger && state.item) setTimeout(() => show(state)); // the viewer has a next item now
}
export const shownItems = () => listed;

/** Store a picture until the tab is closed; return its name for entries of the history. */
export function keepPicture(file) {
  const name = String(brought.size);
  brought.set(name, { file, url: URL.createObjectURL(file) });
  return name;
}

export const pictureOf = (state) => brought.get(state.picture) ?? null;

export const hasQuery = (state) =>
  Boolean(state.text.trim() || pictureOf(state) || state.parts.length);
export const isNarrowed = (state) => Boolean(state.where.length || state.match || state.modality);

/** Return the order of the hits as the service takes it; undefined for the best match first. */
export function orderBy(state) {
  const field = dateField();
  if (!field || (hasQuery(state) && !state.order)) return undefined;
  return state.order === "oldest" ? field : `-${field}`;
}

export function read(address, entry) {
  const parameters = new URLSearchParams(address.search);
  const number = (name, fallback) =>
    /^[1-9]\d{0,5}$/.test(parameters.get(name) ?? "") ? Number(parameters.get(name)) : fallback;
  const oneOf = (name, ...values) => values.find((value) => value === parameters.get(name)) ?? "";
  return {
    ...START,
    view: oneOf("view", "add") || "search",
    index: parameters.get("index"),
    text: parameters.get("q") ?? "",
    picture: entry?.picture ?? null,
    parts: parameters.getAll("part").map(readPart).filter(Boolean),
    instruction: parameters.get("instruction") ?? "",
    modality: parameters.get("find") ?? "",
    order: oneOf("order", "newest", "oldest"),
    date: oneOf("date", ...DATE_FIELDS),
    month: /^(\d{4}-\d\d|none)$/.exec(parameters.get("month") ?? "")?.[0] ?? "",
    stack: oneOf("stack", "no"),
    k: number("k", START.k),
    shown: number("shown", null),
    beam: number("beam", null),
    rerank: parameters.get("rerank") ?? "",
    where: parameters.getAll("where"),
    match: parameters.get("match") ?? "",
    item: parameters.get("item"),
  };
}

/** Parse an item and its weight from the address: `1*50:17` is item 50:17 with weight 1. */
function readPart(text) {
  const match = /^(-?\d*\.?\d+)\*([^]+)$/.exec(text);
  return match && { value: match[2], weight: Number(match[1]) };
}

export function address(state) {
  const parameters = new URLSearchParams();
  const add = (name, value, fallback) =>
    value && value !== fallback && parameters.append(name, value);
  add("view", state.view, "search");
  add("index", state.index);
  if (state.view === "search") {
    add("q", state.text);
    for (const part of state.parts) parameters.append("part", `${part.weight}*${part.value}`);
    add("find", state.modality);
    add("order", state.order);
    add("date", state.date);
    add("month", state.month);
    add("stack", state.stack);
    add("instruction", state.instruction);
    for (const condition of state.where) parameters.append("where", condition);
    add("match", state.match);
    add("k", state.k, START.k);
    add("shown", state.shown);
    add("beam", state.beam);
    add("rerank", state.rerank);
  }
  add("item", state.item);
  const query = parameters.toString().replaceAll("%3A", ":");
  return query ? `./?${query}` : "./";
}
