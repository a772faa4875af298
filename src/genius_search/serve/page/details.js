// What the viewer shows beside an item: its name, text and fields, actions, and for experts its
// path through the codes.

import { ask, call, key } from "./api.js";
import { compose, describeChange, moreLike } from "./composer.js";
import {
  count, dateOf, fileName, itemName, items, matchingLines, Modal, modalityName, originalPath,
  percent, pictureLines, ProblemNotice, say, useRequest,
} from "./elements.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { question } from "./results.js";
import { chosen, current, go, hasQuery, itemsChanged, learnIndexes, notify } from "./state.js";

export function ItemDetails({ item, state }) {
  const [isAsking, setAsking] = useState(false);
  const fields = Object.entries(flat(item.fields ?? {}));
  const date = dateOf(item);
  return html`
    <h2>${item.fields?.title || fileName(item)}</h2>
    ${date && html`<p class="fine">${date}</p>`}
    ${item.image && item.text && html`<p class="text">${item.text}</p>`}
    ${pictureLines(item).length > 0 && html`<${PictureText} item=${item} />`}
    <div class="actions">
      <button type="button" class="primary" onClick=${() => moreLike(item)}>Similar</button>
      <button type="button" onClick=${() => describeChange(item)}>Describe a change</button>
      <button type="button" onClick=${() => compose(item, 1)}>Add to the search</button>
      <button type="button" onClick=${() => compose(item, -0.5)}>Less like this</button>
      ${chosen().writable && hasQuery(state) && html`<${Choice} item=${item} state=${state} />`}
    </div>
    <div class="actions">
      ${item.image &&
      html`
        <${Original} item=${item} target="_blank">Open the original<//>
        <${Original} item=${item} download=${fileName(item)}>Download<//>
      `}
      ${chosen().writable &&
      html`<button type="button" class="danger" onClick=${() => setAsking(true)}>Delete</button>`}
    </div>
    <dl class="fields">
      ${[["file", item.id], ...fields].map(
        ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${String(value)}</dd></div>`,
      )}
    </dl>
    ${item.codes?.length > 0 && html`<${Path} item=${item} state=${state} />`}
    ${isAsking && html`<${DeleteDialog} item=${item} onClose=${() => setAsking(false)} />`}
  `;
}

/** The text in a picture; lines with words of the query are marked. */
function PictureText({ item }) {
  const matching = new Set(matchingLines(item));
  return html`
    <h3>Text in the picture</h3>
    <ul class="lines">
      ${pictureLines(item).map((line) => {
        const isMatch = matching.has(line);
        return html`<li>${isMatch ? html`<mark>${line.words}</mark>` : line.words}</li>`;
      })}
    </ul>
  `;
}

/** Return fields with inner fields as `size.width`. */
function flat(fields, before = "") {
  return Object.entries(fields).reduce(
    (all, [name, value]) =>
      value !== null && typeof value === "object" && !Array.isArray(value)
        ? { ...all, ...flat(value, `${before}${name}.`) }
        : { ...all, [before + name]: Array.isArray(value) ? value.join(", ") : value },
    {},
  );
}

/** A button that stores that this item was meant. */
function Choice({ item, state }) {
  const [isStored, setStored] = useState(false);
  const store = async () => {
    setStored(true);
    try {
      const { json, files } = await question(state);
      await call("v1/feedback", { method: "POST", json: { ...json, id: item.id }, files });
      say(`Remembered: ${itemName(item)}`);
    } catch (problem) {
      setStored(false);
      notify(problem);
    }
  };
  return html`
    <button
      type="button"
      title="Rank it higher in similar searches"
      disabled=${isStored}
      onClick=${store}
    >
      ${isStored ? "Remembered" : "This is it"}
    </button>
  `;
}

/** A link to the original file. It cannot send a key, so with a key the file is fetched first. */
function Original({ item, children, ...attributes }) {
  const path = originalPath(item);
  const fetchFirst = async (event) => {
    const { currentTarget: link } = event;
    if (!key.get() || link.href.startsWith("blob:")) return;
    event.preventDefault();
    try {
      link.href = URL.createObjectURL(await (await call(path)).blob());
      link.click();
    } catch (problem) {
      notify(problem);
    }
  };
  return html`<a class="button" href=${path} onClick=${fetchFirst} data-leaves ...${attributes}>
    ${children}
  </a>`;
}

function Path({ item, state }) {
  const [isOpen, setOpen] = useState(false);
  return html`
    <details class="path" onToggle=${({ target }) => setOpen(target.open)}>
      <summary>Expert</summary>
      <p class="fine">
        ${modalityName(item.modality)}, codes <span class="code">${item.codes.join(" ")}</span>
      </p>
      ${isOpen && hasQuery(state) && html`<${Explanation} item=${item} state=${state} />`}
    </details>
  `;
}

function Explanation({ item, state }) {
  const request = useRequest(item.id, async (signal) => {
    const { json, files } = await question(state);
    const asked = { ...json, id: item.id, k: state.k };
    return ask("v1/explain", { method: "POST", json: asked, files, signal });
  });
  const { value: explanation, problem } = request;
  if (problem) return html`<${ProblemNotice} problem=${problem} again=${request.again} />`;
  if (!explanation) return html`<p class="fine" aria-busy="true">Loading …</p>`;
  const about =
    explanation.levels[0].probability === null
      ? "A longer bar means that fewer codes are closer to the query."
      : "A bar shows the probability of a code, given the query and the codes before it.";
  return html`
    <section aria-label="Path through the codes">
      <h3>Path through the codes</h3>
      <p class="outcome">${outcome(explanation)}</p>
      <p class="fine">The codes of the item, from coarse to fine. ${about}</p>
      <ol class="levels">
        ${chosenLevels(explanation.levels).map(
          (level) => html`<${Level} key=${level.level} ...${level} modality=${item.modality} />`,
        )}
      </ol>
    </section>
  `;
}

/** Describe the rank of the item, or why it has none. */
function outcome({ is_allowed: isAllowed, rank, num_ranked: numRanked, beam }) {
  if (!isAllowed) return "The filters or the selected modality exclude this item.";
  const ranked = `${items(numRanked)} that the search ranked`;
  if (rank !== null) return `Rank ${count(rank)} of ${ranked} with a beam of ${count(beam)}.`;
  return `Not among the ${ranked}; a beam wider than ${count(beam)} may reach it.`;
}

/** Return the levels up to the first with a single item; below it, there is nothing to choose. */
function chosenLevels(levels) {
  const alone = levels.findIndex((level) => level.items === 1) + 1;
  return alone ? levels.slice(0, alone) : levels;
}

function Level({ level, code, items: below, probability, rank, num_siblings: siblings, modality }) {
  const isFirst = level === 0;
  return html`
    <li title=${`${items(below)} with these codes`}>
      <span class="name">${isFirst ? "modality" : `level ${level}`}</span>
      <b class="code">${isFirst ? modalityName(modality) : code}</b>
      <span
        class="meter"
        style=${{ "--share": probability ?? (siblings - rank + 1) / siblings }}
      />
      <span class="number">
        ${probability === null ? `${count(rank)} of ${count(siblings)}` : percent(probability)}
      </span>
    </li>
  `;
}

function DeleteDialog({ item, onClose }) {
  const keep = useRef(null);
  useEffect(() => keep.current.focus(), []);
  return html`
    <${Modal} label="Delete this item?" class="small" onClose=${onClose}>
      <h2>Delete this item?</h2>
      <p>
        Searches will no longer find “${itemName(item)}”. If it comes from a file on the server,
        the file stays, and can be added again. An item that was added on this page is lost.
      </p>
      <div class="actions">
        <button type="button" class="danger" onClick=${() => remove(item)}>Delete</button>
        <button type="button" ref=${keep} onClick=${onClose}>Keep it</button>
      </div>
    <//>
  `;
}

async function remove(item) {
  const parts = current().parts.filter((part) => part.value !== item.id);
  try {
    await ask("v1/items", { method: "DELETE", query: { index: chosen().name, id: item.id } });
  } catch (problem) {
    go({ item: null }, { replace: true });
    notify(problem);
    return;
  }
  itemsChanged();
  await learnIndexes().catch(notify);
  go({ item: null, parts }, { replace: true });
  say(`${item.id} was deleted.`);
}
