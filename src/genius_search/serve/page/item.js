// One item, from the side: its picture and words, what to do with it, and its path through the codes.

import { ask, call, key } from "./api.js";
import { face } from "./cards.js";
import { compose, moreLike, thisBut } from "./composer.js";
import { h, modal } from "./elements.js";
import { nameIndex } from "./main.js";
import { chosen, closeItem, current, go, learnIndexes } from "./navigation.js";
import { say, tell } from "./notices.js";
import { picture } from "./pictures.js";
import { forgetAnswer, question } from "./results.js";
import { address, asks, START } from "./state.js";
import { count, itemName, items, modalityName, percent } from "./words.js";

let sheet = null;
let shownId = null;

/** Open the item of the state, or close what is open. */
export async function showItem(state) {
  if (state.item === shownId) return;
  shownId = state.item;
  const before = sheet;
  sheet = null;
  before?.close();
  if (!state.item) return;
  const body = h("div", { class: "body" });
  const opened = (sheet = modal("Item", { class: "sheet" }, body));
  opened.addEventListener("close", () => sheet === opened && ((sheet = null), (shownId = null), closeItem()));
  try {
    const item = await ask("/v1/items", { query: { index: chosen().name, id: state.item } });
    if (sheet === opened) draw(body, item, state);
  } catch (problem) {
    tell(problem, null, body);
  }
}

function draw(body, item, state) {
  const then = (act) => () => {
    leave();
    act(item);
  };
  const fields = Object.entries(flat(item.fields ?? {}));
  body.replaceChildren(
    h("div", { class: "seen" }, face({ ...item, image: item.image })),
    h("h2", { class: "id" }, item.id),
    h("p", { class: "fine" }, modalityName(item.modality)),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", class: "primary", onclick: then(moreLike) }, "Similar"),
      h("button", { type: "button", onclick: then(thisBut) }, "Like this, but …"),
      h("button", { type: "button", onclick: then((one) => compose(one, 1)) }, "With this"),
      h("button", { type: "button", onclick: then((one) => compose(one, -0.5)) }, "Without this"),
    ),
    h(
      "div",
      { class: "actions" },
      item.image && [original(item, "Open the original", { target: "_blank" }), original(item, "Download", { download: fileName(item) })],
      chosen().writable && h("button", { type: "button", class: "danger", onclick: () => confirmDelete(item) }, "Delete"),
    ),
    fields.length ? h("dl", { class: "fields" }, fields.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))) : "",
    h("section", { class: "path", "aria-label": "Path through the codes" }),
  );
  const path = body.querySelector(".path");
  if (state.view === "search" && asks(state)) explain(path, item, state);
  else plainPath(path, item);
}

const fileName = (item) => item.id.split("/").at(-1);

/** A link to the file of a picture as it is; with a key it is fetched first, since a link cannot send one. */
function original(item, label, attributes) {
  const path = `/v1/items/original?${new URLSearchParams({ index: chosen().name, id: item.id })}`;
  const fetchFirst = async (event) => {
    if (!key.get() || event.target.href.startsWith("blob:")) return;
    event.preventDefault();
    try {
      event.target.href = URL.createObjectURL(await (await call(path)).blob());
      event.target.click();
    } catch (problem) {
      tell(problem);
    }
  };
  return h("a", { class: "button", href: path, onclick: fetchFirst, "data-leaves": true, ...attributes }, label);
}

/** Close without going Back: what was asked for leads elsewhere. */
function leave() {
  const opened = sheet;
  sheet = null;
  shownId = null;
  opened?.close();
}

function flat(fields, before = "") {
  return Object.entries(fields).reduce(
    (found, [name, value]) => (value !== null && typeof value === "object" && !Array.isArray(value) ? { ...found, ...flat(value, `${before}${name}.`) } : { ...found, [before + name]: Array.isArray(value) ? value.join(", ") : value }),
    {},
  );
}

const codeLink = (codes, level, ...children) => h("a", { href: address({ ...START, view: "explore", index: current().index, prefix: codes.slice(0, level + 1) }) }, ...children);

/** Without a query there are codes but no probabilities. */
function plainPath(place, item) {
  if (!item.codes?.length) return;
  place.replaceChildren(
    h("h3", {}, "Its codes"),
    h("p", { class: "fine" }, "From coarse to fine; each leads to the items that share it."),
    h("p", { class: "codes" }, item.codes.map((code, level) => codeLink(item.codes, level, h("span", { class: "unseen" }, `level ${level}: `), String(code)))),
  );
}

async function explain(place, item, state) {
  place.replaceChildren(h("h3", {}, "Its path"), h("p", { class: "fine", "aria-busy": "true" }, "Reading its path …"));
  try {
    const { json, files } = await question(state);
    const told = await ask("/v1/explain", { method: "POST", json: { ...json, id: item.id }, files });
    place.replaceChildren(
      h("h3", {}, "Its path"),
      h("p", { class: "outcome" }, outcome(told)),
      h("p", { class: "fine" }, `Its codes, coarse to fine. ${told.levels[0].probability === null ? "The longer the bar, the fewer codes are closer to the query." : "A bar is the probability that the query gives a code after those before it."} Open a level to see the others.`),
      ...path(told, item),
      ...sharing(told.neighbours),
    );
  } catch (problem) {
    tell(problem, () => explain(place, item, state), place);
  }
}

/** Where it stands, or that it was not reached. */
function outcome({ is_allowed: isAllowed, rank, touched, beam }) {
  if (!isAllowed) return "The filters, or the choice of what may be found, leave it out.";
  if (rank !== null) return `Rank ${count(rank)} of ${items(touched)} that the search looked at, with a beam of ${count(beam)}.`;
  return `It is not among the ${items(touched)} that the search looked at; a beam wider than ${count(beam)} may reach it.`;
}

/** Level by level, as long as there was anything to choose; where one item is left its other codes are one line. */
function path({ codes, levels }, item) {
  const alone = levels.findIndex((level) => level.items === 1) + 1;
  const chosenLevels = alone ? levels.slice(0, alone) : levels;
  const rest = codes.slice(chosenLevels.length);
  return [
    h("ol", { class: "levels" }, chosenLevels.map((level) => levelRow(codes, level, item))),
    rest.length > 0 && h("p", { class: "fine rest" }, `Only this item is left; its other codes are `, h("span", { class: "code" }, rest.join(" ")), "."),
  ].filter(Boolean);
}

function levelRow(codes, level, item) {
  const share = level.probability ?? (level.num_siblings - level.rank + 1) / level.num_siblings;
  const number = level.probability === null ? `${count(level.rank)} of ${count(level.num_siblings)}` : percent(level.probability);
  const name = level.level === 0 ? "modality" : `level ${level.level}`;
  const place = level.num_siblings === 1 ? "The only code that exists here." : `Choice ${count(level.rank)} of ${count(level.num_siblings)}.`;
  const shown = level.level === 0 ? modalityName(item.modality) : String(level.code);
  const sum = `${name}, code ${level.code}: ${number}`;
  const siblings = level.siblings.filter((one) => one.code !== level.code);
  const row = h(
    "summary",
    { "aria-label": `${sum}, ${items(level.items)}` },
    level.level > 0 && h("span", { class: "name" }, name),
    h("b", { class: level.level === 0 ? "both" : "code" }, shown),
    h("span", { class: "meter", "--share": share }),
    h("span", { class: "number" }, number),
    h("span", { class: "below" }, count(level.items)),
  );
  return h(
    "li",
    {},
    h(
      "details",
      {},
      row,
      h("div", { class: "siblings" }, h("p", { class: "fine" }, place, " ", codeLink(codes, level.level, `The ${items(level.items)} below it`)), siblings.length ? h("ul", {}, siblings.map((one) => siblingTile(codes, level.level, one))) : ""),
    ),
  );
}

function siblingTile(codes, level, one) {
  const to = [...codes.slice(0, level), one.code];
  return h(
    "li",
    {},
    codeLink(
      to,
      level,
      h("span", { class: "thumbs" }, one.examples.slice(0, 3).map((example) => (example.image ? picture(example.image, "", 128) : h("span", { class: "snippet" }, example.text)))),
      h("span", { class: "label" }, h("b", { class: "code" }, one.code), one.probability !== null && ` ${percent(one.probability)}`),
      h("span", { class: "fine" }, items(one.items)),
    ),
  );
}

function sharing(examples) {
  if (!examples.length) return [];
  const tile = (item) => h("li", {}, h("a", { href: address({ ...current(), item: item.id }), "aria-label": itemName(item) }, item.image ? picture(item.image, "", 128) : h("span", { class: "snippet" }, item.text)));
  return [h("h3", {}, "Its nearest neighbours in the codes"), h("ul", { class: "neighbours" }, examples.map(tile))];
}

function confirmDelete(item) {
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Keep it");
  const dialog = modal(
    "Delete this item?",
    { class: "small" },
    h("h2", {}, "Delete this item?"),
    h("p", {}, `Searches will no longer find “${itemName(item)}”. This cannot be undone.`),
    h("div", { class: "actions" }, h("button", { type: "button", class: "danger", onclick: () => remove(item, dialog) }, "Delete"), cancel),
  );
  cancel.focus();
}

async function remove(item, dialog) {
  try {
    await ask("/v1/items", { method: "DELETE", query: { index: chosen().name, id: item.id } });
  } catch (problem) {
    dialog.close();
    tell(problem);
    leave();
    go({ item: null }, { replace: true });
    return;
  }
  dialog.close();
  leave();
  forgetAnswer();
  await learnIndexes().then(nameIndex, tell);
  await go({ item: null, parts: current().parts.filter((part) => part.value !== item.id) }, { replace: true });
  say(`${item.id} is deleted.`);
}

