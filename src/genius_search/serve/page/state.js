// Where one is. The address says what is shown, so that a search can be shared and Back works.
// Only a brought picture is not in it: it stays in this tab, and history entries point to it.

import { ask } from "./api.js";

export const START = Object.freeze({
  view: "search", index: null, text: "", picture: null, parts: [], instruction: "", modality: "",
  k: 20, beam: null, rerank: "", where: [], match: "", item: null,
});

const brought = new Map();
let state = START;
let indexes = [];
let show = async () => {};

/** What shows a state, once it is reached. */
export function onShow(shows) {
  show = shows;
}

export const current = () => state;
export const allIndexes = () => indexes;

/** The index that is searched. */
export const chosen = () => indexes.find((index) => index.name === state.index) ?? indexes[0];

/** Go where these changes lead; the address follows. */
export function go(changes, { replace = false, opened = false } = {}) {
  const next = { ...state, ...changes };
  history[replace ? "replaceState" : "pushState"]({ picture: next.picture, opened }, "", address(next));
  return arrive(next);
}

/** Show a state; before the indexes are known there is nothing to show, and the address keeps it. */
export function arrive(next) {
  state = next;
  return indexes.length ? show(next) : Promise.resolve();
}

/** Close the item: Back where it was opened from here, else the same page without it. */
export function closeItem() {
  if (!state.item) return;
  if (history.state?.opened) history.back();
  else go({ item: null }, { replace: true });
}

/** Counts change when items come and go. */
export async function learnIndexes() {
  indexes = (await ask("/v1/indexes")).indexes;
}

/** Keep a file for as long as the tab lives; returns what history entries call it. */
export function keepPicture(file) {
  const name = String(brought.size);
  brought.set(name, { file, url: URL.createObjectURL(file) });
  return name;
}

export const pictureOf = (state) => brought.get(state.picture) ?? null;

export const hasQuery = (state) => Boolean(state.text.trim() || pictureOf(state) || state.parts.length);
/** Filters without a query show what they allow. */
export const asks = (state) => hasQuery(state) || Boolean(state.where.length || state.match || state.modality);

export function read(address, entry) {
  const given = new URLSearchParams(address.search);
  const number = (name, usual) => (/^[1-9]\d{0,5}$/.test(given.get(name) ?? "") ? Number(given.get(name)) : usual);
  return {
    ...START,
    view: given.get("view") === "add" ? "add" : "search",
    index: given.get("index"),
    text: given.get("q") ?? "",
    picture: entry?.picture ?? null,
    parts: given.getAll("part").map(readPart).filter(Boolean),
    instruction: given.get("instruction") ?? "",
    modality: given.get("find") ?? "",
    k: number("k", START.k),
    beam: number("beam", null),
    rerank: given.get("rerank") ?? "",
    where: given.getAll("where"),
    match: given.get("match") ?? "",
    item: given.get("item"),
  };
}

/** An item with its weight in the address: `1*50:17`. */
function readPart(spelt) {
  const found = /^(-?\d*\.?\d+)\*([^]+)$/.exec(spelt);
  return found && { value: found[2], weight: Number(found[1]) };
}

export function address(state) {
  const said = new URLSearchParams();
  const say = (name, value, usual) => value && value !== usual && said.append(name, value);
  say("view", state.view, "search");
  say("index", state.index);
  if (state.view === "search") {
    say("q", state.text);
    for (const part of state.parts) said.append("part", `${part.weight}*${part.value}`);
    say("find", state.modality);
    say("instruction", state.instruction);
    for (const condition of state.where) said.append("where", condition);
    say("match", state.match);
    say("k", state.k, START.k);
    say("beam", state.beam);
    say("rerank", state.rerank);
  }
  say("item", state.item);
  const query = said.toString().replaceAll("%3A", ":");
  return query ? `/?${query}` : "/";
}
