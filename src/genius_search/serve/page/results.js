// The hits of a query, best first, or why there are none.

import { ask, ready } from "./api.js";
import { search } from "./composer.js";
import { count, itemName, percent, ProblemNotice, say, useRequest } from "./elements.js";
import { Grid } from "./grid.js";
import { html, useEffect, useRef } from "./preact.js";
import {
  chosen, currentEdition, go, isNarrowed, list, notify, orderBy, pictureOf,
} from "./state.js";

const MAX_SHOWN = 200;

/** Return the query and conditions of a state as JSON, and the picture that it names. */
export async function question(state) {
  const brought = pictureOf(state);
  const files = brought ? { picture: await ready(brought.file, { shrink: true }) } : {};
  return { json: questionJson(state), files };
}

function questionJson(state) {
  return {
    index: chosen().name,
    text: state.text.trim() || undefined,
    image: pictureOf(state) ? "picture" : undefined,
    parts: state.parts.length
      ? state.parts.map(({ value, weight }) => ({ id: value, weight }))
      : undefined,
    instruction: state.instruction || undefined,
    modality: state.modality || undefined,
    where: state.where.length ? state.where : undefined,
    match: state.match || undefined,
    beam: state.beam ?? undefined,
    rerank: state.rerank || undefined,
  };
}

/** Return how the hits are sorted and stacked. */
function arrangement(state) {
  const near = chosen().stores_embeddings ? "near" : "content";
  return {
    k: state.shown ?? state.k,
    order_by: orderBy(state),
    group_by: state.stack === "no" ? undefined : near,
  };
}

export function Results({ state }) {
  const arranged = arrangement(state);
  const name = JSON.stringify([
    questionJson(state),
    arranged,
    pictureOf(state)?.url,
    currentEdition(),
  ]);
  const request = useRequest(name, async (signal) => {
    const { json, files } = await question(state);
    return ask("v1/search", { method: "POST", json: { ...json, ...arranged }, files, signal });
  });
  const { value: answer, problem, isBusy } = request;
  useEffect(() => {
    if (problem && state.picture && problem.message.startsWith("Image: "))
      setTimeout(refusePicture, 0, problem); // not while this page is drawn
    if (answer) announce(answer, state);
  }, [answer, problem]);
  if (answer) list(answer.hits);
  return html`
    <div id="results" aria-busy=${isBusy ? "true" : "false"}>
      ${problem && html`<${ProblemNotice} problem=${problem} again=${request.again} />`}
      ${answer && html`<${Answer} answer=${answer} state=${state} />`}
    </div>
  `;
}

function refusePicture(problem) {
  go({ picture: null }, { replace: true });
  const message = problem.message.replace(/^Image: (it )?/, "The file ");
  notify({ status: 0, title: "This picture cannot be used", message });
}

function announce({ hits, good_match: isGood }, state) {
  if (!hits.length) say(`Nothing found. ${isNarrowed(state) ? "Filters are active." : ""}`);
  else if (isGood === false) say(`No good match. ${hitsText(hits)}, all uncertain.`);
  else say(`${hitsText(hits)}. The first: ${itemName(hits[0])}`);
}

const hitsText = (hits) => `${count(hits.length)} ${hits.length === 1 ? "hit" : "hits"}`;

function Answer({ answer, state }) {
  const { hits, good_match: isGood, more_in_group: stacked, took_ms: took, settings } = answer;
  const grid = useRef(null);
  const first = useRef(null); // place of the card that gets the focus once it is there
  const milliseconds = Math.ceil(took.queue + took.search);
  useEffect(() => {
    if (first.current === null) return;
    grid.current.querySelectorAll(".card .open")[first.current]?.focus();
    first.current = null;
  }, [answer]);
  const showMore = () => {
    first.current = hits.length;
    const shown = state.shown ?? state.k;
    go({ shown: Math.min(MAX_SHOWN, shown < 50 ? 50 : shown + 50) }, { replace: true });
  };
  if (!hits.length) return html`<${Nothing} state=${state} />`;
  const isDoubtful = isGood === false;
  const hasMore = hits.length >= (state.shown ?? state.k) && hits.length < MAX_SHOWN;
  return html`
    <div class="taken">
      <h2>${hitsText(hits)}</h2>
      <${StackChoice} state=${state} label="Stack near-duplicates" />
      <details class="fine">
        <summary>About this search</summary>
        <p>${milliseconds} ms, beam ${settings.beam}, re-ranking ${settings.rerank}</p>
      </details>
    </div>
    ${isDoubtful &&
    html`<div class="notice warn">
      <h3>No good match</h3>
      <p>${noMatchText(hits[0], state)}</p>
    </div>`}
    <div ref=${grid} class=${isDoubtful ? "doubtful" : ""}>
      <${Grid}
        items=${isDoubtful ? hits.map((hit) => ({ ...hit, probability: null })) : hits}
        stacked=${stacked}
        label=${`Hits, ${state.order ? `${state.order} first` : "best first"}`}
        ordered
        state=${state}
      />
    </div>
    ${hasMore &&
    html`<p class="more"><button type="button" onClick=${showMore}>Show more</button></p>`}
  `;
}

export function StackChoice({ state, label }) {
  return html`
    <label class="fine stack">
      <input
        type="checkbox"
        checked=${state.stack !== "no"}
        onChange=${({ target }) => search({ stack: target.checked ? "" : "no" })}
      />
      ${label}
    </label>
  `;
}

function noMatchText(best, state) {
  const chance =
    best.probability === null
      ? "No hit is close enough to the query."
      : `The best hit is right with a probability of only ${percent(best.probability)}.`;
  return `${chance} ${isNarrowed(state) ? "Fewer filters or other" : "Other"} words may help.`;
}

export function Nothing({ state }) {
  const widen = () => search({ where: [], match: "", modality: "" });
  return html`
    <div class="empty">
      <h2>Nothing found</h2>
      <p>${isNarrowed(state) ? "No items match these filters." : "The index has no items yet."}</p>
      ${isNarrowed(state) &&
      html`<p class="actions">
        <button type="button" onClick=${widen}>Search without filters</button>
      </p>`}
    </div>
  `;
}
