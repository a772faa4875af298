// The codes as a tree: what shares each prefix, how evenly it divides, what is alike or the same.

import { ask } from "./api.js";
import { card } from "./cards.js";
import { byId, h } from "./elements.js";
import { chosen, current, go } from "./navigation.js";
import { say, tell } from "./notices.js";
import { picture } from "./pictures.js";
import { address, START } from "./state.js";
import { count, items, modalityNames, percent } from "./words.js";

const LISTS = { tree: "Tree", collisions: "Same codes", duplicates: "Near-duplicates" };
const GROUPS_AT_ONCE = 20;
const SEEN_IN_A_BRANCH = 4;
let running = null;

const to = (changes) => address({ ...START, view: "explore", index: current().index, ...changes });

export async function showExplorer(state) {
  const place = byId("explore");
  running?.abort();
  const { signal } = (running = new AbortController());
  place.setAttribute("aria-busy", "true");
  if (!place.hasChildNodes()) place.replaceChildren(heading(state));
  try {
    const drawn = state.list === "collisions" || state.list === "duplicates" ? await groups(state, signal) : await node(state, signal);
    fillWith(place, heading(state), ...drawn.filter(Boolean));
  } catch (problem) {
    if (problem.name === "AbortError") return;
    const why = h("div");
    fillWith(place, heading(state), trail(state.prefix), why);
    tell(problem, () => showExplorer(state), why);
  }
  place.setAttribute("aria-busy", "false");
}

/** Whoever worked in here stays in here: at the same dial, else at the heading. */
function fillWith(place, ...children) {
  const held = place.contains(document.activeElement) ? document.activeElement.id || "explore-title" : null;
  place.replaceChildren(...children);
  if (held) (byId(held) ?? byId("explore-title")).focus();
}

function heading(state) {
  return h("div", { class: "heading" }, h("h1", { id: "explore-title", tabindex: "-1" }, "Codes"), lists(state));
}

function lists(state) {
  const link = ([list, name]) => h("a", { href: to({ list }), "aria-current": (state.list in LISTS ? state.list : "tree") === list ? "true" : null }, name);
  return h("nav", { class: "tabs", "aria-label": "What of the codes" }, Object.entries(LISTS).map(link));
}

function trail(prefix, name = null) {
  const step = (code, level) => h("li", {}, h("a", { href: to({ prefix: prefix.slice(0, level + 1) }), "aria-current": level === prefix.length - 1 ? "location" : null }, h("span", { class: "unseen" }, level ? `level ${level}: ` : "modality: "), level === 0 && name ? name : String(code)));
  return h("nav", { class: "trail", "aria-label": "Where in the tree" }, h("ol", {}, h("li", {}, h("a", { href: to({}), "aria-current": prefix.length ? null : "location" }, "All items")), prefix.map(step)));
}

/** Level 0 stands for a modality; which one, its items say. */
function onlyModality(examples) {
  const seen = new Set(examples.map((one) => one.modality));
  return seen.size === 1 ? modalityNames([...seen][0]) : null;
}

async function node(state, signal) {
  const told = await ask("/v1/codes", { query: { index: chosen().name, prefix: state.prefix.join(",") }, signal });
  const { children, examples } = told;
  const levels = chosen().levels.length;
  const where = state.prefix.length === 0 ? "by modality" : `at level ${told.level}`;
  const isListed = told.items <= examples.length && children.every((child) => child.items === 1 || children.length === 1);
  const isSeen = !isListed && children.every((child) => child.items <= SEEN_IN_A_BRANCH);
  say(`${items(told.items)}, ${told.num_children} branches.`);
  return [
    trail(state.prefix, onlyModality(examples)),
    h(
      "dl",
      { class: "facts" },
      fact("Items", count(told.items)),
      children.length > 0 && fact("Branches", count(told.num_children)),
      told.entropy !== null && told.num_children > 1 && fact("Entropy", `${told.entropy.toFixed(2)} bits`, `as even as ${number(2 ** told.entropy)} equal branches`),
      fact("Depth", `${state.prefix.length} of ${levels}`),
    ),
    children.length > 1 && strip(children),
    !isListed && h("h2", {}, `Divided ${where}`),
    !isListed && h("ul", { class: "branches" }, children.map((child) => branch(state.prefix, child, children[0].share))),
    told.truncated && h("p", { class: "fine more" }, `The ${children.length} largest branches are shown.`),
    !isSeen && h("h2", {}, isListed ? "The items here" : "Some of the items here"),
    !isSeen && h("ul", { class: "grid small" }, examples.map((item) => card(item))),
  ];
}

const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value));

function fact(name, value, note = null) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value, note && h("small", {}, note)));
}

/** How evenly the items divide, at a glance. */
function strip(children) {
  return h("div", { class: "strip", "aria-hidden": "true" }, children.map((child) => h("span", { "--grow": child.share, title: `${child.code}: ${percent(child.share)}` })));
}

function branch(prefix, child, largest) {
  const only = child.items === 1 && child.examples[0];
  const name = prefix.length === 0 ? onlyModality(child.examples) : null;
  const href = only ? address({ ...current(), item: only.id }) : to({ prefix: [...prefix, child.code] });
  const label = `${name ?? `Code ${child.code}`}: ${items(child.items)}, ${percent(child.share)}`;
  return h(
    "li",
    {},
    h(
      "a",
      { href, "aria-label": label },
      h("span", { class: `mosaic of-${Math.min(4, child.examples.length)}` }, child.examples.slice(0, 4).map((one) => (one.image ? picture(one.image, "", 128) : h("span", { class: "snippet" }, one.text)))),
      h("span", { class: "label" }, h("b", { class: name ? "" : "code" }, name ?? child.code), h("span", {}, `${count(child.items)} · ${percent(child.share)}`)),
      h("span", { class: "meter", "--share": child.share / largest }),
    ),
  );
}

async function groups(state, signal, offset = 0) {
  const same = state.list === "collisions";
  const query = { index: chosen().name, offset, limit: GROUPS_AT_ONCE, levels: same ? 0 : state.apart };
  const told = await ask("/v1/codes/duplicates", { query, signal });
  if (!offset) say(`${count(told.total)} groups.`);
  const list = h("ol", { class: "groups" }, told.groups.map(group));
  const more = h("button", { type: "button" }, "Show more");
  let shown = told.groups.length;
  more.addEventListener("click", async () => {
    try {
      const next = await ask("/v1/codes/duplicates", { query: { ...query, offset: shown } });
      const first = next.groups.map(group);
      list.append(...first);
      shown += next.groups.length;
      more.hidden = shown >= told.total || !next.groups.length;
      first[0]?.querySelector("a")?.focus();
    } catch (problem) {
      tell(problem);
    }
  });
  more.hidden = shown >= told.total;
  return [
    h("p", { class: "lead" }, same ? "Items that share every code. Only ranking by embeddings can tell them apart." : "Items that share all but the last codes: often the same thing twice."),
    !same && apartDial(state),
    h("p", { class: "taken" }, h("strong", {}, told.total === 1 ? "1 group" : `${count(told.total)} groups`)),
    told.total === 0 && h("div", { class: "empty" }, h("h2", {}, same ? "No two items share their codes" : "No near-duplicates"), h("p", {}, same ? "Every item can be told from every other." : "Let more of the last codes differ to see what is alike.")),
    list,
    h("p", { class: "more" }, more),
  ];
}

function apartDial(state) {
  const most = Math.max(1, chosen().levels.length - 1);
  const output = h("output", { for: "apart" }, state.apart);
  const dial = h("input", { id: "apart", type: "range", min: 1, max: most, value: Math.min(state.apart, most) });
  dial.addEventListener("input", () => (output.textContent = dial.value));
  dial.addEventListener("change", () => go({ apart: Number(dial.value) }, { replace: true }));
  return h("div", { class: "row" }, h("label", { for: "apart" }, "Last codes that may differ"), h("div", { class: "slider" }, dial, output));
}

function group({ codes, items: size, examples: members }) {
  return h(
    "li",
    {},
    h("p", { class: "codes" }, h("a", { href: to({ prefix: codes }), "aria-label": `${items(size)} with the codes ${codes.join(" ")}` }, codes.join(" › ")), h("span", { class: "fine" }, items(size))),
    h("ul", { class: "grid small" }, members.map((item) => card(item))),
  );
}
