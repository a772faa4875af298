// The hits: a grid of cards, how sure they are, the time taken; or why there are none.

import { ask } from "./api.js";
import { card } from "./cards.js";
import { moreLike, thisBut } from "./composer.js";
import { byId, h } from "./elements.js";
import { chosen, go } from "./navigation.js";
import { say, tell } from "./notices.js";
import { ready } from "./pictures.js";
import { asks, pictureOf, START } from "./state.js";
import { count, itemName, milliseconds, percent } from "./words.js";

const MOST = 200;
const QUICK_MS = 400;
let running = null;
let answered = { question: null };
let lastTook = 0;

/** Whether hits come quickly enough to be shown as one types. */
export const isQuick = () => lastTook < QUICK_MS;

/** The search as the server wants it: JSON, and the picture that it names. */
export async function question(state) {
  const brought = pictureOf(state);
  const files = brought ? { picture: await ready(brought.file, { shrink: true }) } : {};
  const json = {
    index: chosen().name,
    text: state.text.trim() || undefined,
    image: brought ? "picture" : undefined,
    parts: state.parts.length ? state.parts.map(({ kind, value, weight }) => ({ [kind === "item" ? "id" : kind]: value, weight })) : undefined,
    instruction: state.instruction || undefined,
    modality: state.modality || undefined,
    where: state.where.length ? state.where : undefined,
    match: state.match || undefined,
    k: state.k,
    beam: state.beam ?? undefined,
    rerank: state.rerank || undefined,
  };
  return { json, files };
}

export async function showResults(state) {
  running?.abort(); // whatever is asked already, hits or the beginning, must not come after what is asked now
  const { signal } = (running = new AbortController());
  const place = byId("results");
  place.setAttribute("aria-busy", "false");
  if (!asks(state)) {
    answered = { question: null };
    await showBeginning(state, signal);
    return;
  }
  const asked = await question(state);
  const spelt = JSON.stringify([asked.json, pictureOf(state)?.url]);
  if (signal.aborted || answered.question === spelt) return;
  place.setAttribute("aria-busy", "true");
  const begun = performance.now();
  try {
    const answer = await ask("/v1/search", { method: "POST", ...asked, signal });
    answered = { question: spelt };
    lastTook = performance.now() - begun;
    draw(place, answer, state, lastTook);
  } catch (problem) {
    if (problem.name === "AbortError") return;
    answered = { question: null };
    if (state.picture && problem.message.startsWith("Image: ")) {
      await go({ picture: null }, { replace: true });
      tell({ status: 0, title: "This picture cannot be used", message: problem.message.replace(/^Image: (it )?/, "The file ") });
      return;
    }
    tell(problem, () => showResults(state), place);
  }
  place.setAttribute("aria-busy", "false");
}

/** Ask again even if the question is the same: the items have changed. */
export function forgetAnswer() {
  answered = { question: null };
}

function draw(place, answer, state, roundTrip) {
  const { hits, good_match: isGood } = answer;
  const found = `${count(hits.length)} ${hits.length === 1 ? "hit" : "hits"} in ${milliseconds(answer.took_ms.queue + answer.took_ms.search)}`;
  if (!hits.length) {
    say(`Nothing found. ${narrowed(state) ? "Filters are set." : ""}`);
    place.replaceChildren(nothing(state));
    return;
  }
  const held = place.contains(document.activeElement) && (document.activeElement.closest(".card")?.dataset.id ?? "");
  const list = h("ol", { class: gridClass(hits, isGood === false), "aria-label": "Hits, best first" }, hits.map((hit) => hitCard(isGood === false ? { ...hit, probability: null } : hit, state)));
  const more = hits.length >= state.k && state.k < MOST && h("p", { class: "more" }, h("button", { type: "button", onclick: () => showMore(state) }, "Show more"));
  place.replaceChildren(
    ...[
      h("div", { class: "taken" }, h("h2", {}, found), timeBar(answer, roundTrip)),
      isGood === false && h("div", { class: "notice warn" }, h("h3", {}, "No good match"), h("p", {}, noMatchWords(hits[0], state))),
      list,
      more,
    ].filter(Boolean),
  );
  if (held !== false) (list.querySelector(`[data-id="${CSS.escape(held)}"] .open`) ?? list.querySelector(".open")).focus();
  say(isGood === false ? `No good match. ${found}, all doubtful.` : `${found}. The first: ${itemName(hits[0])}`);
}

/** Texts alone need width, not squares. */
function gridClass(found, isDoubtful) {
  return ["grid", found.every((item) => !item.image) && "texts", isDoubtful && "doubtful"].filter(Boolean).join(" ");
}

function noMatchWords(best, state) {
  const chance = best.probability === null ? "Nothing here is near enough to be called one." : `The best hit is right with a probability of only ${percent(best.probability)}.`;
  return `${chance} ${narrowed(state) ? "A wider choice or other words may help." : "Other words may help."}`;
}

const narrowed = (state) => state.where.length > 0 || state.match || state.modality;

function nothing(state) {
  const widen = () => go({ where: [], match: "", modality: "" });
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, "Nothing found"),
    h("p", {}, narrowed(state) ? "No items match these filters." : "The index has no items yet."),
    narrowed(state) && h("p", { class: "actions" }, h("button", { type: "button", onclick: widen }, "Search without filters")),
  );
}

async function showMore(state) {
  const before = state.k;
  await go({ k: Math.min(MOST, state.k < 50 ? 50 : state.k + 50) }, { replace: true });
  byId("results").querySelectorAll(".card .open")[before]?.focus();
}

function hitCard(hit, state) {
  const sure = hit.probability === null ? null : percent(hit.probability);
  const label = `Hit ${hit.rank}: ${itemName(hit)}${sure ? `, ${sure} likely` : ""}`;
  const rated = sure && h("span", { class: "sure", title: `probability ${sure}` }, h("span", { class: "meter", "--share": hit.probability }), sure);
  return card(
    hit,
    { label, state },
    h(
      "div",
      { class: "acts" },
      h("span", { class: "rating", "aria-hidden": "true", title: `score ${hit.score.toFixed(4)}` }, h("span", { class: "rank" }, hit.rank), rated),
      h("button", { type: "button", title: "Similar (M)", onclick: () => moreLike(hit) }, "Similar"),
      h("button", { type: "button", title: "Like this, but … (B)", onclick: () => thisBut(hit) }, "Like this, but …"),
    ),
  );
}

/** Where the time went, stage by stage; what is missing to the whole was the network's. */
function timeBar({ took_ms: took, settings }, roundTrip) {
  const stages = [["waiting", took.queue], ["searching", took.search], ["network", Math.max(0, roundTrip - took.queue - took.search)]];
  const words = stages.map(([name, value]) => `${name} ${milliseconds(value)}`).join(", ");
  return h(
    "div",
    { class: "time" },
    h("span", { class: "stages", "aria-hidden": "true" }, stages.map(([name, value], at) => h("span", { class: `stage-${at}`, title: `${name} ${milliseconds(value)}`, "--grow": Math.max(value, 0.01) }))),
    h("span", { class: "fine" }, `${words}; beam ${settings.beam}, re-ranking ${settings.rerank}`),
  );
}

/** Before the first search: what there is to be found. */
async function showBeginning(state, signal) {
  const place = byId("results");
  try {
    const { examples, items } = await ask("/v1/codes", { query: { index: chosen().name, prefix: "" }, signal });
    if (!items) {
      place.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "The index is empty"), h("p", {}, "Add pictures and texts, then search them."), h("p", {}, h("a", { class: "button", href: "/?view=add" }, "Add items"))));
      return;
    }
    place.replaceChildren(
      h("div", { class: "taken" }, h("h2", {}, "Some of what is here"), h("p", { class: "fine" }, "Open one, drag one into the query, or describe something else.")),
      h("ul", { class: gridClass(examples, false), "aria-label": "Examples" }, examples.map((item) => card(item, { state: { ...START, index: state.index } }))),
    );
  } catch (problem) {
    tell(problem, () => showResults(state), place);
  }
}
