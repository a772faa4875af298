// Where one is: the state, the indexes of the server, and how to get elsewhere.

import { ask } from "./api.js";
import { address, START } from "./state.js";

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
