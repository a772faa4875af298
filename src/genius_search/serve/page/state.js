// What is shown is said by the address, so that a search can be shared and Back works.
// Only a brought picture is not in it: it stays in this tab, and history entries point to it.

export const START = Object.freeze({
  view: "search", index: null, text: "", picture: null, parts: [], instruction: "", modality: "",
  k: 20, beam: null, rerank: "", where: [], match: "", item: null, prefix: [], list: "tree", apart: 1,
});

const brought = new Map();

/** Keep a file for as long as the tab lives; returns what history entries call it. */
export function keepPicture(file) {
  const name = crypto.randomUUID?.() ?? String(Math.random());
  brought.set(name, { file, url: URL.createObjectURL(file) });
  return name;
}

export const pictureOf = (state) => brought.get(state.picture) ?? null;

export function read(address, entry) {
  const given = new URLSearchParams(address.search);
  const number = (name, usual) => (/^[1-9]\d{0,5}$/.test(given.get(name) ?? "") ? Number(given.get(name)) : usual);
  const view = given.get("view");
  return {
    ...START,
    view: view === "explore" || view === "add" ? view : "search",
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
    prefix: (given.get("prefix") ?? "").split(",").filter((code) => /^\d+$/.test(code)).map(Number),
    list: given.get("list") ?? "tree",
    apart: number("apart", START.apart),
  };
}

/** Part of a query in the address: `1*item:50:17`, `-0.5*text:a frame`. */
function readPart(spelt) {
  const found = /^(-?\d*\.?\d+)\*(item|text):([^]+)$/.exec(spelt);
  return found && { kind: found[2], value: found[3], weight: Number(found[1]) };
}

export function address(state) {
  const said = new URLSearchParams();
  const say = (name, value, usual) => value && value !== usual && said.append(name, value);
  say("view", state.view, "search");
  say("index", state.index);
  if (state.view === "search") {
    say("q", state.text);
    for (const part of state.parts) if (part.value) said.append("part", `${part.weight}*${part.kind}:${part.value}`);
    say("find", state.modality);
    say("instruction", state.instruction);
    for (const condition of state.where) said.append("where", condition);
    say("match", state.match);
    say("k", state.k, START.k);
    say("beam", state.beam);
    say("rerank", state.rerank);
  }
  if (state.view === "explore") {
    say("list", state.list, "tree");
    if (state.list === "tree") say("prefix", state.prefix.join(","));
    if (state.list === "duplicates") say("apart", state.apart, START.apart);
  }
  say("item", state.item);
  const query = said.toString().replaceAll("%2C", ",").replaceAll("%3A", ":").replaceAll("*", "*");
  return query ? `/?${query}` : "/";
}

export const asks = (state) => Boolean(state.text.trim() || pictureOf(state) || state.parts.some((part) => part.value.trim()));
