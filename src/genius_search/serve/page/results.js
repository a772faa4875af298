// The hits: a grid of cards with probabilities and the time of the search, or why there are none.

import { ask, call, picture, ready } from "./api.js";
import { moreLike, thisBut } from "./composer.js";
import { byId, count, h, itemName, items, percent, say, tell } from "./elements.js";
import { address, asks, chosen, go, hasQuery, pictureOf, START } from "./state.js";

const MAX_SHOWN = 200;
let running = null; // AbortController of the current request
let answered = null; // the request whose hits are shown, as text

/** Return the search of a state as the body of a request: JSON, and the picture that it names. */
export async function question(state) {
  const brought = pictureOf(state);
  const files = brought ? { picture: await ready(brought.file, { shrink: true }) } : {};
  const json = {
    index: chosen().name,
    text: state.text.trim() || undefined,
    image: brought ? "picture" : undefined,
    parts: state.parts.length
      ? state.parts.map(({ value, weight }) => ({ id: value, weight }))
      : undefined,
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
  running?.abort(); // an older response must not replace a newer one
  const { signal } = (running = new AbortController());
  const place = byId("results");
  place.setAttribute("aria-busy", "false");
  if (!asks(state)) {
    answered = null;
    await showBeginning(state, signal);
    return;
  }
  const asked = await question(state);
  const spelt = JSON.stringify([asked.json, pictureOf(state)?.url]);
  if (signal.aborted || answered === spelt) return;
  place.setAttribute("aria-busy", "true");
  try {
    const answer = await ask("v1/search", { method: "POST", ...asked, signal });
    answered = spelt;
    draw(place, answer, state);
  } catch (problem) {
    if (problem.name === "AbortError") return;
    answered = null;
    if (state.picture && problem.message.startsWith("Image: ")) {
      await go({ picture: null }, { replace: true });
      tell({
        status: 0,
        title: "This picture cannot be used",
        message: problem.message.replace(/^Image: (it )?/, "The file "),
      });
      return;
    }
    tell(problem, () => showResults(state), place);
  }
  place.setAttribute("aria-busy", "false");
}

/** Send the next request even if it equals the last one, since the items have changed. */
export function forgetAnswer() {
  answered = null;
}

function draw(place, { hits, good_match: isGood, took_ms: took, settings }, state) {
  const heading = hasQuery(state)
    ? `${count(hits.length)} ${hits.length === 1 ? "hit" : "hits"}`
    : `${items(hits.length)}, newest first`;
  const details = `${Math.ceil(took.queue + took.search)} ms, beam ${settings.beam}, re-ranking ${settings.rerank}`;
  if (!hits.length) {
    say(`Nothing found. ${narrowed(state) ? "Filters are active." : ""}`);
    place.replaceChildren(nothing(state));
    return;
  }
  const held =
    place.contains(document.activeElement) &&
    (document.activeElement.closest(".card")?.dataset.id ?? "");
  const list = h(
    "ol",
    { class: gridClass(hits, isGood === false), "aria-label": "Hits, best first" },
    hits.map((hit) => hitCard(isGood === false ? { ...hit, probability: null } : hit, state)),
  );
  const more =
    hits.length >= state.k &&
    state.k < MAX_SHOWN &&
    h(
      "p",
      { class: "more" },
      h("button", { type: "button", onclick: () => showMore(state) }, "Show more"),
    );
  place.replaceChildren(
    ...[
      h(
        "div",
        { class: "taken" },
        h("h2", {}, heading),
        h("details", { class: "fine" }, h("summary", {}, "Details"), details),
      ),
      isGood === false &&
        h(
          "div",
          { class: "notice warn" },
          h("h3", {}, "No good match"),
          h("p", {}, noMatchWords(hits[0], state)),
        ),
      list,
      more,
    ].filter(Boolean),
  );
  if (held !== false)
    (
      list.querySelector(`[data-id="${CSS.escape(held)}"] .open`) ?? list.querySelector(".open")
    ).focus();
  say(
    isGood === false
      ? `No good match. ${heading}, all uncertain.`
      : `${heading}. The first: ${itemName(hits[0])}`,
  );
}

/** Return the classes of the grid. Texts without pictures get wide cards instead of squares. */
function gridClass(shown, isDoubtful) {
  return ["grid", shown.every((item) => !item.image) && "texts", isDoubtful && "doubtful"]
    .filter(Boolean)
    .join(" ");
}

function noMatchWords(best, state) {
  const chance =
    best.probability === null
      ? "No hit is close enough to the query."
      : `The best hit is right with a probability of only ${percent(best.probability)}.`;
  return `${chance} ${narrowed(state) ? "Fewer filters or other words may help." : "Other words may help."}`;
}

const narrowed = (state) => state.where.length > 0 || state.match || state.modality;

function nothing(state) {
  const widen = () => go({ where: [], match: "", modality: "" });
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, "Nothing found"),
    h("p", {}, narrowed(state) ? "No items match these filters." : "The index has no items yet."),
    narrowed(state) &&
      h(
        "p",
        { class: "actions" },
        h("button", { type: "button", onclick: widen }, "Search without filters"),
      ),
  );
}

async function showMore(state) {
  const before = state.k;
  await go({ k: Math.min(MAX_SHOWN, state.k < 50 ? 50 : state.k + 50) }, { replace: true });
  byId("results").querySelectorAll(".card .open")[before]?.focus();
}

function hitCard(hit, state) {
  const sure = hit.probability === null ? null : percent(hit.probability);
  const label = `Hit ${hit.rank}: ${itemName(hit)}${sure ? `, ${sure} likely` : ""}`;
  const rated =
    sure &&
    h(
      "span",
      { class: "sure", title: `probability ${sure}` },
      h("span", { class: "meter", "--share": hit.probability }),
      sure,
    );
  return card(
    hit,
    label,
    state,
    h(
      "div",
      { class: "acts" },
      h(
        "span",
        { class: "rating", "aria-hidden": "true", title: `score ${hit.score.toFixed(4)}` },
        h("span", { class: "rank" }, hit.rank),
        rated,
      ),
      h("button", { type: "button", onclick: () => moreLike(hit) }, "Similar"),
      h(
        "button",
        {
          type: "button",
          "aria-label": "Like this, but …",
          title: "Like this, but …",
          onclick: () => thisBut(hit),
        },
        "But …",
      ),
      chosen().writable &&
        hasQuery(state) &&
        h(
          "button",
          {
            type: "button",
            "aria-label": "This is it",
            title: "This is it: rank it higher in similar searches",
            onclick: (event) => learn(hit, state, event.target),
          },
          "✓",
        ),
    ),
  );
}

async function learn(hit, state, button) {
  button.disabled = true;
  try {
    const { json, files } = await question(state);
    await call("v1/feedback", { method: "POST", json: { ...json, id: hit.id }, files });
    say(`Remembered: ${itemName(hit)}`);
  } catch (problem) {
    button.disabled = false;
    tell(problem);
  }
}

/** Create a card with a link to an item, and further elements below it. */
function card(item, label, state, ...rest) {
  const open = h(
    "a",
    { class: "open", href: address({ ...state, item: item.id }), "aria-label": label },
    face(item),
  );
  return h("li", { class: "card", "data-id": item.id }, open, ...rest);
}

/**
 * Return the picture and text of an item. The shorter a text without a picture is, the larger it is
 * shown.
 */
export function face(item, size) {
  const text = item.passage || item.text || item.id;
  return [
    item.image && h("span", { class: "frame" }, picture(item.image, "", size)),
    item.image
      ? item.text && h("span", { class: "text" }, text)
      : h("span", { class: "text alone", "--size": Math.sqrt(8500 / text.length) }, text),
  ];
}

/** Before the first search, show examples of the items. */
async function showBeginning(state, signal) {
  const place = byId("results");
  try {
    if (!chosen().items) {
      place.replaceChildren(
        h(
          "div",
          { class: "empty" },
          h("h2", {}, "The index is empty"),
          h("p", {}, h("a", { class: "button", href: "./?view=add" }, "Add items")),
        ),
      );
      return;
    }
    const { items: examples } = await ask("v1/items/examples", {
      query: { index: chosen().name },
      signal,
    });
    place.replaceChildren(
      h(
        "div",
        { class: "taken" },
        h("h2", {}, "Examples from this index"),
        h("p", { class: "fine" }, "Open an item, or describe what you are looking for."),
      ),
      h(
        "ul",
        { class: gridClass(examples, false), "aria-label": "Examples" },
        examples.map((item) => card(item, itemName(item), { ...START, index: state.index })),
      ),
    );
  } catch (problem) {
    tell(problem, () => showResults(state), place);
  }
}
