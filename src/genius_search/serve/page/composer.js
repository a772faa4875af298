// The form of the query: words, a picture and weighted items, with modality, order and panels.

import { isPicture } from "./api.js";
import { count, Icon, IconButton, modalityNames, Picture, say } from "./elements.js";
import { ExpertPanel } from "./expert.js";
import { FiltersPanel } from "./filters.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import {
  chosen, current, dateField, dateFields, go, hasQuery, keepPicture, notify, pictureOf, START,
} from "./state.js";

const MAX_WEIGHT = 3;
const TYPING_MS = 250;
const MIN_TYPED_LENGTH = 3; // shorter texts are searched for only on Enter
let typing = 0; // timer of the search while typing
let isTyped = false; // whether the shown hits are those of a search while typing

const box = () => document.getElementById("text");

/** Search with the contents of the form and some changes. The number of hits starts again. */
export function search(changes, { replace = false } = {}) {
  if (!replace) isTyped = false;
  const text = box()?.value.trim() ?? current().text;
  const fresh = { view: "search", item: null, shown: null, month: "" };
  go({ ...current(), ...fresh, text, ...changes }, { replace });
}

/** Search while the user types. The searches of one input are a single step of the history. */
function searchTyped() {
  const text = box()?.value.trim() ?? "";
  if (text.length < MIN_TYPED_LENGTH || text === current().text) return;
  const replace = isTyped;
  search({}, { replace });
  isTyped = true;
}

export function bring(files) {
  const refuse = (title, message) => notify({ status: 0, title, message });
  if (!files.length) return;
  if (!chosen().reads_images)
    refuse("Pictures are not supported", "This index can only be searched with words.");
  else if (!isPicture(files[0]))
    refuse("Not a picture", `${files[0].name} is not a picture (JPEG, PNG, …).`);
  else search({ picture: keepPicture(files[0]) });
}

/** Add an item of the index to the query, with a positive or negative weight. */
export function compose(item, weight) {
  const others = current().parts.filter((part) => part.value !== item.id);
  search({ parts: [...others, { value: item.id, weight, item }] });
}

export function moreLike(item, changes = {}) {
  const { index, modality } = current();
  const parts = [{ value: item.id, weight: 1, item }];
  search({ ...START, index, modality, parts, ...changes });
}

export function describeChange(item) {
  moreLike(item);
  setTimeout(() => box()?.focus()); // after the viewer has returned the focus
  say("Type what should be different, then press Enter.");
}

export function Composer({ state }) {
  const text = useRef(null);
  const [panel, setPanel] = useState(null);
  useEffect(() => {
    const element = text.current;
    if (document.activeElement !== element || element.value.trim() !== state.text)
      element.value = state.text;
  }, [state.text]);
  const submit = (event) => {
    event.preventDefault();
    clearTimeout(typing);
    const isShown = isTyped && text.current.value.trim() === current().text;
    isTyped = false;
    if (!isShown) search({});
  };
  const type = () => {
    clearTimeout(typing);
    if (!pictureOf(current())) typing = setTimeout(searchTyped, TYPING_MS);
  };
  const choose = ({ target }) => {
    bring([...target.files]);
    target.value = "";
  };
  const placeholder =
    state.parts.length || pictureOf(state)
      ? "What should be different?"
      : chosen().reads_images
        ? "Search by words or a picture"
        : "Search by words";
  return html`
    <form class="composer" role="search" autocomplete="off" onSubmit=${submit}>
      <${Parts} state=${state} />
      <div class="line">
        <input
          id="text"
          ref=${text}
          type="text"
          name="q"
          aria-label="Search query"
          aria-keyshortcuts="/"
          enterkeyhint="search"
          maxlength="4000"
          placeholder=${placeholder}
          onInput=${type}
        />
        <label class="icon" title="Search by a picture" hidden=${!chosen().reads_images}>
          <input
            id="file"
            type="file"
            accept="image/*,.heic,.heif"
            class="unseen"
            onChange=${choose}
          />
          <${Icon} name="picture" /><span class="unseen">Search by a picture</span>
        </label>
        <button type="submit" class="primary">Search</button>
      </div>
    </form>
    <div class="controls">
      <${ModalityChoice} state=${state} />
      <div class="panels">
        <${OrderChoice} state=${state} />
        <${PanelButton}
          name="filters"
          label="Filters"
          mark=${state.where.length + (state.match ? 1 : 0)}
          ...${{ panel, setPanel }}
        />
        <${PanelButton}
          name="expert"
          label="Expert"
          mark=${[state.beam, state.rerank, state.instruction, state.k !== START.k].filter(Boolean)
            .length}
          ...${{ panel, setPanel }}
        />
      </div>
    </div>
    <div class="panel" id="panel-filters" hidden=${panel !== "filters"}>
      ${panel === "filters" && html`<${FiltersPanel} state=${state} search=${search} />`}
    </div>
    <div class="panel" id="panel-expert" hidden=${panel !== "expert"}>
      ${panel === "expert" && html`<${ExpertPanel} state=${state} search=${search} />`}
    </div>
  `;
}

function PanelButton({ name, label, mark, panel, setPanel }) {
  return html`
    <button
      type="button"
      aria-expanded=${panel === name ? "true" : "false"}
      aria-controls=${`panel-${name}`}
      onClick=${() => setPanel(panel === name ? null : name)}
    >
      ${label}${mark > 0 && html`<small><span class="unseen">, set: </span>${mark}</small>`}
    </button>
  `;
}

/** The choice of an order. If several fields have dates, each is an order of its own. */
function OrderChoice({ state }) {
  const fields = dateFields();
  if (!fields.length) return null;
  const by = (field) => (fields.length > 1 ? ` by “${field}”` : "");
  const orders = fields.flatMap((date) => [
    [`newest ${date}`, `Newest first${by(date)}`],
    [`oldest ${date}`, `Oldest first${by(date)}`],
  ]);
  if (hasQuery(state)) orders.unshift([" ", "Best match"]);
  const order = state.order || (hasQuery(state) ? "" : "newest");
  const choose = ({ target }) => {
    const [chosenOrder, date] = target.value.split(" ");
    search({ order: chosenOrder, date: date === fields[0] ? "" : date });
  };
  return html`
    <label class="order">
      <span class="unseen">Order</span>
      <select value=${order ? `${order} ${dateField()}` : " "} onChange=${choose}>
        ${orders.map(([value, name]) => html`<option key=${value} value=${value}>${name}</option>`)}
      </select>
    </label>
  `;
}

function ModalityChoice({ state }) {
  const modalities = Object.entries(chosen().modalities);
  if (modalities.length < 2) return null;
  return html`
    <fieldset class="choice">
      <legend class="unseen">Modality of the results</legend>
      ${[["", null], ...modalities].map(
        ([modality, number]) => html`
          <label key=${modality}>
            <input
              type="radio"
              name="modality"
              value=${modality}
              checked=${state.modality === modality}
              onChange=${() => search({ modality })}
            />
            <span>
              ${modality ? modalityNames(modality) : "All"}
              ${modality && html` <small>${count(number)}</small>`}
            </span>
          </label>
        `,
      )}
    </fieldset>
  `;
}

function Parts({ state }) {
  const brought = pictureOf(state);
  if (!brought && !state.parts.length) return null;
  return html`
    <ul class="parts" aria-label="Parts of the query">
      ${brought &&
      html`
        <li class="part" key="picture">
          <img src=${brought.url} alt="Your picture" />
          <span>your picture</span>
          <${IconButton}
            name="close"
            label="Remove your picture"
            onClick=${() => remove({ picture: null })}
          />
        </li>
      `}
      ${state.parts.map(
        (part) => html`<${Part} key=${part.value} part=${part} parts=${state.parts} />`,
      )}
    </ul>
  `;
}

function Part({ part, parts }) {
  const name = part.item?.text || part.value;
  const query = new URLSearchParams({ index: chosen().name, id: part.value });
  const thumbnail = part.item ? part.item.image : `v1/items/picture?${query}`;
  const change = (weight) => {
    const rounded = Math.round(weight * 4) / 4 || Math.sign(weight - part.weight) / 4;
    const bounded = Math.max(-MAX_WEIGHT, Math.min(MAX_WEIGHT, rounded));
    const weighed = { ...part, weight: bounded };
    search({ parts: parts.map((other) => (other === part ? weighed : other)) });
  };
  return html`
    <li class=${part.weight < 0 ? "part without" : "part"}>
      ${thumbnail && html`<${Picture} path=${thumbnail} size=${96} />`}
      <span class="name">${part.weight < 0 && html`<em>without </em>`}${name}</span>
      <span class="weight" role="group" aria-label=${`Weight of ${name}`}>
        <${IconButton} name="minus" label="Less" onClick=${() => change(part.weight - 0.25)} />
        <output>${part.weight < 0 ? "−" : ""}${Math.abs(part.weight)}</output>
        <${IconButton} name="plus" label="More" onClick=${() => change(part.weight + 0.25)} />
      </span>
      <${IconButton}
        name="close"
        label=${`Remove ${name}`}
        onClick=${() => remove({ parts: parts.filter((other) => other !== part) })}
      />
    </li>
  `;
}

/** Search without a part; its button, which had the focus, is gone. */
function remove(changes) {
  search(changes);
  box().focus();
}
