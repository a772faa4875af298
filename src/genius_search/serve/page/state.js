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
  k: 20,
  beam: null,
  rerank: "",
  where: [],
  match: "",
  item: null,
});

const brought = new Map();
let state = START;
let indexes = [];
let show = async () => {};

/** Set the function that shows a state. */
export function onShow(shows) {
  show = shows;
}

export const current = () => state;
export const allIndexes = () => indexes;

/** Return the selected index. */
export const chosen = () => indexes.find((index) => index.name === state.index) ?? indexes[0];

/** Change the state and the address, and show the new state. */
export function go(changes, { replace = false, opened = false } = {}) {
  const next = { ...state, ...changes };
  history[replace ? "replaceState" : "pushState"](
    { picture: next.picture, opened },
    "",
    address(next),
  );
  return arrive(next);
}

/** Show a state. Before the indexes are loaded, it is only stored. */
export function arrive(next) {
  state = next;
  return indexes.length ? show(next) : Promise.resolve();
}

/**
 * Close the item: go back if it was opened from this page, otherwise remove it from the address.
 */
export function closeItem() {
  if (!state.item) return;
  if (history.state?.opened) history.back();
  else go({ item: null }, { replace: true });
}

/** Load the descriptions of the indexes; their counts change with the items. */
export async function learnIndexes() {
  indexes = (await ask("v1/indexes")).indexes;
}

/** Store a picture until the tab is closed; return its name for entries of the history. */
export function keepPicture(file) {
  const name = String(brought.size);
  brought.set(name, { file, url: URL.createObjectURL(file) });
  return name;
}

export const pictureOf = (state) => brought.get(state.picture) ?? null;

export const hasQuery = (state) =>
  Boolean(state.text.trim() || pictureOf(state) || state.parts.length);
/** Return whether there is anything to search for; filters without a query list items. */
export const asks = (state) =>
  hasQuery(state) || Boolean(state.where.length || state.match || state.modality);

export function read(address, entry) {
  const parameters = new URLSearchParams(address.search);
  const number = (name, fallback) =>
    /^[1-9]\d{0,5}$/.test(parameters.get(name) ?? "") ? Number(parameters.get(name)) : fallback;
  return {
    ...START,
    view: parameters.get("view") === "add" ? "add" : "search",
    index: parameters.get("index"),
    text: parameters.get("q") ?? "",
    picture: entry?.picture ?? null,
    parts: parameters.getAll("part").map(readPart).filter(Boolean),
    instruction: parameters.get("instruction") ?? "",
    modality: parameters.get("find") ?? "",
    k: number("k", START.k),
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
    add("instruction", state.instruction);
    for (const condition of state.where) parameters.append("where", condition);
    add("match", state.match);
    add("k", state.k, START.k);
    add("beam", state.beam);
    add("rerank", state.rerank);
  }
  add("item", state.item);
  const query = parameters.toString().replaceAll("%3A", ":");
  return query ? `./?${query}` : "./";
}
