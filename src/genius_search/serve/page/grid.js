// A grid of items in rows of equal height, in which each picture keeps its shape.

import { moreLike } from "./composer.js";
import {
  count, dateOf, duration, fileName, isVideo, itemName, percent, Picture,
} from "./elements.js";
import { html, useState } from "./preact.js";
import { address } from "./state.js";

const TEXT_RATIO = 1.25;
const UNKNOWN_RATIO = 1.33; // until the picture is loaded
// Pictures beyond these shapes have a margin, so that their names are readable.
const MIN_RATIO = 0.62;
const MAX_RATIO = 2.8;
const ratios = new Map(); // address of a picture -> its width divided by its height

/**
 * Draw items as cards with links to them.
 *
 * `stacked` has the number of near-duplicates that each item stands for; `ordered` says that items
 * are hits with ranks.
 */
export function Grid({ items, stacked = null, label, ordered = false, state }) {
  const List = ordered ? "ol" : "ul";
  return html`
    <${List} class="grid" aria-label=${label}>
      ${items.map(
        (item, place) =>
          html`<${Card}
            key=${item.id}
            item=${item}
            others=${stacked?.[place] ?? 0}
            rank=${ordered ? item.rank : null}
            state=${state}
          />`,
      )}
    <//>
  `;
}

function Card({ item, others, rank, state }) {
  const [ratio, setRatio] = useState(ratios.get(item.image) ?? UNKNOWN_RATIO);
  const sure = typeof item.probability === "number" ? percent(item.probability) : null;
  const learnRatio = ({ naturalWidth: width, naturalHeight: height }) => {
    const shape = Math.min(MAX_RATIO, Math.max(MIN_RATIO, width / height));
    ratios.set(item.image, shape);
    setRatio(shape);
  };
  const date = [dateOf(item), item.fields?.city].filter(Boolean).join(" · ");
  const sources = (item.matched ?? []).filter((name) => name !== "caption").join(" and ");
  const length = isVideo(item) && item.fields.duration;
  const label = [
    rank === null ? itemName(item) : `Hit ${rank}: ${itemName(item)}`,
    date,
    length > 0 && `video of ${duration(length)}`,
    sure && `${sure} likely`,
  ];
  return html`
    <li
      class="card"
      data-id=${item.id}
      style=${{ "--ratio": (item.image ? ratio : TEXT_RATIO).toFixed(3) }}
    >
      <a
        class="open"
        href=${address({ ...state, item: item.id })}
        aria-label=${label.filter(Boolean).join(", ")}
      >
        ${item.image
          ? html`<span class="frame">
              <${Picture} path=${item.image} onLoad=${learnRatio} />
              ${length > 0 &&
              html`<span class="length">
                ${item.moment > 0 && `${duration(item.moment)} of `}${duration(length)}
              </span>`}
            </span>`
          : html`<${TextFace} item=${item} />`}
        <span class="foot">
          ${(!item.text || !item.image) && html`<span class="name">${title(item)}</span>`}
          ${item.image && item.text && html`<span class="text">${item.passage || item.text}</span>`}
        </span>
      </a>
      <div class="acts">
        ${date && html`<span>${date}</span>`}
        ${sources && html`<span title="has words of the query">in its ${sources}</span>`}
        ${sure &&
        html`<span class="sure" aria-hidden="true" title=${`probability ${sure}`}>
          <span class="meter" style=${{ "--share": item.probability }} />${sure}
        </span>`}
        ${others > 0 &&
        html`<button
          type="button"
          class="others"
          title="Show this item and its duplicates one by one"
          onClick=${() => moreLike(item, { stack: "no" })}
        >
          ${count(others)} alike
        </button>`}
        <button type="button" onClick=${() => moreLike(item)}>Similar</button>
      </div>
    </li>
  `;
}

/** The beginning of a text, or its matching passage; the shorter it is, the larger. */
function TextFace({ item }) {
  const text = item.passage || item.text || item.id;
  return html`
    <span class="frame page">
      <span class="text alone" style=${{ "--size": Math.sqrt(8500 / text.length).toFixed(2) }}>
        ${text}
      </span>
    </span>
  `;
}

/** Return the title of an item, or the name of its file. */
const title = (item) => item.fields?.title || fileName(item);
