// The form of the query: words, a picture and weighted items, with modality, filters and settings.

import { isPicture, picture } from "./api.js";
import { byId, count, h, icon, modalityNames, say, tell } from "./elements.js";
import { filtersPanel } from "./filters.js";
import { asks, chosen, current, go, keepPicture, pictureOf, START } from "./state.js";

const MAX_WEIGHT = 3;
const BEAMS = [10, 20, 50, 100, 200, 500, 1000];
const COUNTS = [10, 20, 50, 100];
const RERANKS = [
  ["", "Default"],
  ["none", "None"],
  ["codes", "By codes"],
  ["embeddings", "By embeddings"],
];
const TYPING_MS = 250;
const MIN_TYPED_LENGTH = 3; // shorter texts are searched for only on Enter
let typing = 0; // timer of the search while typing
let typed = false; // whether the shown hits are those of a search while typing

export function startComposer() {
  const form = byId("composer");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(typing);
    const isShown = typed && byId("text").value.trim() === current().text;
    typed = false;
    if (!isShown) search({});
  });
  byId("text").addEventListener("input", () => {
    clearTimeout(typing);
    if (!pictureOf(current())) typing = setTimeout(searchTyped, TYPING_MS);
  });
  byId("file").addEventListener(
    "change",
    (event) => (bring([...event.target.files]), (event.target.value = "")),
  );
  for (const button of document.querySelectorAll(".panels button"))
    button.addEventListener("click", () => openPanel(button));
}

/** Search with the contents of the form and some changes. */
function search(changes, how = {}) {
  if (!how.replace) typed = false;
  return go(
    {
      ...START,
      ...current(),
      view: "search",
      item: null,
      k: current().k,
      text: byId("text").value.trim(),
      ...changes,
    },
    how,
  );
}

/** Search while the user types. The searches of one input are a single step of the history. */
function searchTyped() {
  const text = byId("text").value.trim();
  if (byId("search").hidden || text.length < MIN_TYPED_LENGTH || text === current().text) return;
  const replace = typed;
  search({}, { replace });
  typed = true;
}

export function bring(files) {
  if (!files.length) return;
  if (!chosen().reads_images)
    tell({
      status: 0,
      title: "Pictures are not supported",
      message: "This index can only be searched with words.",
    });
  else if (!isPicture(files[0]))
    tell({
      status: 0,
      title: "Not a picture",
      message: `${files[0].name} is not a picture (JPEG, PNG, …).`,
    });
  else search({ picture: keepPicture(files[0]) });
}

/** Add an item of the index to the query, with a positive or negative weight. */
export function compose(item, weight, changes = {}) {
  const parts = [
    ...current().parts.filter((part) => part.value !== item.id),
    { value: item.id, weight, item },
  ];
  search({ parts, ...changes });
}

export function moreLike(item) {
  search({
    ...START,
    index: current().index,
    modality: current().modality,
    parts: [{ value: item.id, weight: 1, item }],
    text: "",
  });
}

export function thisBut(item) {
  moreLike(item);
  const text = byId("text");
  text.focus();
  say("Type what should be different, then press Enter.");
}

function openPanel(button, open = button.getAttribute("aria-expanded") !== "true") {
  for (const other of document.querySelectorAll(".panels button")) {
    const isOpen = other === button && open;
    other.setAttribute("aria-expanded", isOpen);
    byId(other.getAttribute("aria-controls")).hidden = !isOpen;
  }
  if (open)
    byId(button.getAttribute("aria-controls")).querySelector("input, select, button")?.focus();
}

/** Update the form from the state. */
export function fill(state) {
  const text = byId("text");
  if (document.activeElement !== text || text.value.trim() !== state.text) text.value = state.text;
  const hasMore = state.parts.length > 0 || pictureOf(state) !== null;
  text.required = !asks(state); // the browser then asks for a text
  text.placeholder = hasMore
    ? "Like this, but …"
    : chosen().reads_images
      ? "Search by words or a picture"
      : "Search by words";
  byId("bring").hidden = !chosen().reads_images;
  fillParts(state);
  fillModality(state);
  filtersPanel(byId("panel-filters"), state, search);
  keepFocus(byId("panel-dials"), () => dialsPanel(state));
  const marks = {
    "panel-filters": state.where.length + (state.match ? 1 : 0),
    "panel-dials": [state.beam, state.rerank, state.instruction, state.k !== START.k].filter(
      Boolean,
    ).length,
  };
  for (const button of document.querySelectorAll(".panels button")) {
    const mark = marks[button.getAttribute("aria-controls")];
    button.querySelector("small")?.remove();
    if (mark) button.append(h("small", {}, h("span", { class: "unseen" }, ", set: "), mark));
  }
}

/** Redraw a panel, and restore the focus to the element with the same id. */
function keepFocus(panel, draw, otherwise = null) {
  const name = panel.contains(document.activeElement) ? document.activeElement.id : "";
  panel.replaceChildren(...draw());
  if (name) (byId(name) ?? byId(otherwise))?.focus();
}

function fillParts(state) {
  const brought = pictureOf(state);
  const chips = () => [
    ...(brought
      ? [
          h(
            "li",
            { class: "part" },
            h("img", { src: brought.url, alt: "Your picture" }),
            h("span", {}, "your picture"),
            remove("picture", "your picture", () => search({ picture: null })),
          ),
        ]
      : []),
    ...state.parts.map((part, place) => chip(part, place, state)),
  ];
  byId("parts").hidden = !brought && !state.parts.length;
  keepFocus(byId("parts"), chips, "text");
}

function chip(part, place, state) {
  const change = (changed) =>
    search({ parts: state.parts.flatMap((other, at) => (at === place ? changed : [other])) });
  const name = part.item?.text || part.value;
  const thumbnail = part.item
    ? part.item.image
    : `v1/items/picture?${new URLSearchParams({ index: chosen().name, id: part.value })}`;
  const step = (by) =>
    change([
      {
        ...part,
        weight: Math.max(
          -MAX_WEIGHT,
          Math.min(MAX_WEIGHT, Math.round((part.weight + by) * 4) / 4 || by),
        ),
      },
    ]);
  return h(
    "li",
    { class: part.weight < 0 ? "part without" : "part" },
    thumbnail && picture(thumbnail, "", 96),
    h("span", { class: "name" }, part.weight < 0 ? h("em", {}, "without ") : "", name),
    h(
      "span",
      { class: "weight", role: "group", "aria-label": `Weight of ${name}` },
      h(
        "button",
        {
          type: "button",
          class: "icon",
          id: `less-${place}`,
          "aria-label": "Less",
          onclick: () => step(-0.25),
        },
        icon("minus"),
      ),
      h("output", {}, `${part.weight < 0 ? "−" : ""}${Math.abs(part.weight)}`),
      h(
        "button",
        {
          type: "button",
          class: "icon",
          id: `more-${place}`,
          "aria-label": "More",
          onclick: () => step(0.25),
        },
        icon("plus"),
      ),
    ),
    remove(place, name, () => change([])),
  );
}

function remove(place, name, onclick) {
  return h(
    "button",
    {
      type: "button",
      class: "icon",
      id: `remove-${place}`,
      "aria-label": `Remove ${name}`,
      onclick,
    },
    icon("close"),
  );
}

function fillModality(state) {
  const here = Object.keys(chosen().modalities);
  const legend = byId("modality").querySelector("legend");
  const options = ["", ...here].map((modality) =>
    h(
      "label",
      {},
      h("input", {
        type: "radio",
        name: "modality",
        id: `find-${modality || "any"}`,
        value: modality,
        checked: state.modality === modality,
        onchange: () => search({ modality }),
      }),
      h(
        "span",
        {},
        modality ? modalityNames(modality) : "All",
        modality && h("small", {}, ` ${count(chosen().modalities[modality])}`),
      ),
    ),
  );
  const focused = byId("modality").contains(document.activeElement)
    ? document.activeElement.id
    : "";
  byId("modality").replaceChildren(legend, ...options);
  byId("modality").hidden = here.length < 2;
  if (focused) byId(focused)?.focus();
}

function dialsPanel(state) {
  const at = state.beam ? BEAMS.findIndex((beam) => beam >= state.beam) + 1 : 0;
  const defaults = chosen().settings;
  const wide = (width) =>
    width < state.k ? `${width} (${state.k} for ${state.k} hits)` : String(width);
  const describe = (position) =>
    position === 0 ? `default, ${wide(defaults.beam)}` : wide(BEAMS[position - 1]);
  const output = h("output", { for: "beam" }, describe(at));
  const beam = h("input", {
    id: "beam",
    type: "range",
    min: 0,
    max: BEAMS.length,
    step: 1,
    value: at,
    "aria-valuetext": describe(at),
  });
  beam.addEventListener(
    "input",
    () => (
      (output.textContent = describe(Number(beam.value))),
      beam.setAttribute("aria-valuetext", output.textContent)
    ),
  );
  beam.addEventListener("change", () =>
    search({ beam: Number(beam.value) === 0 ? null : BEAMS[Number(beam.value) - 1] }),
  );
  const rerankName = ([value, name]) =>
    value
      ? name
      : `Default (${RERANKS.find(([option]) => option === defaults.rerank)[1].toLowerCase()})`;
  const rerankOption = (option) =>
    h(
      "option",
      { value: option[0], disabled: option[0] === "embeddings" && !chosen().stores_embeddings },
      rerankName(option),
    );
  const rerank = h(
    "select",
    { id: "rerank", onchange: () => search({ rerank: rerank.value }) },
    RERANKS.map(rerankOption),
  );
  rerank.value = state.rerank;
  const counts = [...new Set([...COUNTS, state.k])].sort((a, b) => a - b);
  const k = h(
    "select",
    { id: "k", onchange: () => search({ k: Number(k.value) }) },
    counts.map((number) => h("option", { value: number }, number)),
  );
  k.value = state.k;
  const suggestions = h(
    "datalist",
    { id: "instructions" },
    chosen().instructions.map((text) => h("option", { value: text })),
  );
  const instruction = h("input", {
    id: "instruction",
    type: "text",
    maxlength: 1000,
    list: "instructions",
    value: state.instruction,
    placeholder: "Description of the results (optional)",
  });
  instruction.addEventListener("change", () => search({ instruction: instruction.value.trim() }));
  return [
    h(
      "div",
      { class: "row dials" },
      h(
        "div",
        {},
        h("label", { for: "beam" }, "Beam width: number of paths to follow"),
        h("div", { class: "slider" }, beam, output),
      ),
      h("div", {}, h("label", { for: "rerank" }, "Re-ranking"), rerank),
      h("div", {}, h("label", { for: "k" }, "Hits"), k),
    ),
    h(
      "div",
      { class: "row" },
      h("label", { for: "instruction" }, "Instruction"),
      instruction,
      suggestions,
    ),
    h(
      "p",
      { class: "fine" },
      "A wider beam finds more and takes longer; “Details” above the hits shows the time. The beam is never narrower than the number of hits.",
    ),
  ];
}
