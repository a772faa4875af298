// Items without a query: a timeline by month if they have dates, otherwise the newest first. It
// goes on as one scrolls.

import { ask } from "./api.js";
import {
  count, items as itemsText, monthName, monthOf, ProblemNotice, useRequest,
} from "./elements.js";
import { Grid } from "./grid.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { Nothing, StackChoice } from "./results.js";
import { address, chosen, currentEdition, dateField, list, orderBy } from "./state.js";

const PAGE_ITEMS = 60;
const LOAD_AHEAD = "1200px"; // the next page is loaded this far before its place is reached

/** Return the conditions of a state as a search without a query. */
const conditions = (state) => ({
  index: chosen().name,
  where: state.where,
  match: state.match || undefined,
  modality: state.modality || undefined,
});

/** Return the condition that the timeline begins at the month of the state. */
function beginning({ month, order }) {
  if (!month) return [];
  if (month === "none") return [`${dateField()} is missing`];
  return [`${dateField()}${order === "oldest" ? ">=" : "<="}${month}`];
}

export function Browse({ state }) {
  const name = JSON.stringify([conditions(state), dateField(), currentEdition()]);
  const { value: counts, problem, isBusy, again } = useRequest(name, (signal) =>
    countMonths(state, signal),
  );
  if (chosen().items === 0) return html`<${Empty} />`;
  if (counts?.total === 0) return html`<div id="results"><${Nothing} state=${state} /></div>`;
  return html`
    <div
      id="results"
      class=${counts?.months.length ? "timeline" : ""}
      aria-busy=${isBusy ? "true" : "false"}
    >
      ${problem && html`<${ProblemNotice} problem=${problem} again=${again} />`}
      ${counts &&
      html`
        <div class="taken">
          <h2>${itemsText(counts.total)}, ${state.order || "newest"} first</h2>
          <${StackChoice} state=${state} label="Stack copies" />
        </div>
        ${counts.months.length > 0 && html`<${Months} months=${counts.months} state=${state} />`}
        <${Pages} key=${name + state.order + state.month + state.stack} state=${state} />
      `}
    </div>
  `;
}

/** Count the items of each month, and all items. */
async function countMonths(state, signal) {
  const date = dateField();
  const facets = date ? ["modality", `${date}:month`] : ["modality"];
  const json = { ...conditions(state), facets, k: 1, fields: [] };
  const answer = await ask("v1/search", { method: "POST", json, signal });
  const total = answer.facets.modality.reduce((sum, { items }) => sum + items, 0);
  const months = (answer.facets[`${date}:month`] ?? []).map(({ value, items }) => [value, items]);
  const undated = total - months.reduce((sum, [, items]) => sum + items, 0);
  if (months.length && undated > 0) months.push(["none", undated]);
  return { total, months };
}

function Empty() {
  return html`
    <div class="empty" id="results">
      <h2>The index is empty</h2>
      ${chosen().writable && html`<p><a class="button" href="./?view=add">Add items</a></p>`}
    </div>
  `;
}

/** Links to the months. */
function Months({ months, state }) {
  const link = ([month, number]) => html`
    <li key=${month}>
      <a
        href=${address({ ...state, month })}
        aria-current=${state.month === month ? "true" : null}
        data-month=${month}
      >
        ${month === "none" ? "Without a date" : monthName(month)} <small>${count(number)}</small>
      </a>
    </li>
  `;
  return html`
    <nav class="months" aria-label="Months">
      ${state.month &&
      html`<a class="button" href=${address({ ...state, month: "" })}>From the beginning</a>`}
      <ul>
        ${(state.order === "oldest" ? months.toReversed() : months).map(link)}
      </ul>
    </nav>
  `;
}

/** The pages of the list so far. A button loads the next one, and is pressed as one scrolls. */
function Pages({ state }) {
  const [pages, setPages] = useState([]);
  const [isWanted, setWanted] = useState(true);
  const isLast = pages.length > 0 && pages.at(-1).hits.length < PAGE_ITEMS;
  const name = isWanted && !isLast ? `${pages.length}` : null;
  const { problem, isBusy, again } = useRequest(name, async (signal) => {
    const json = {
      ...conditions(state),
      where: [...state.where, ...beginning(state)],
      order_by: orderBy(state),
      group_by: state.stack === "no" ? undefined : "content",
      facets: ["modality"], // a search without a query needs a condition, or something to count
      k: PAGE_ITEMS,
      offset: pages.length * PAGE_ITEMS,
    };
    const page = await ask("v1/search", { method: "POST", json, signal });
    setPages([...pages, page]);
    setWanted(false);
  });
  const more = isLast ? null : () => setWanted(true);
  const hits = pages.flatMap((page) => page.hits);
  const stacked = pages.flatMap((page) => page.more_in_group ?? []);
  list(hits, more);
  return html`
    <div class="pages" aria-busy=${isBusy ? "true" : "false"}>
      ${sections(hits, stacked).map(
        (section) => html`<${Section} key=${section.month} ...${section} state=${state} />`,
      )}
      ${problem && html`<${ProblemNotice} problem=${problem} again=${again} />`}
      ${more && pages.length > 0 && html`<${MoreButton} isBusy=${isBusy} more=${more} />`}
    </div>
  `;
}

/** Divide items, in their order, into months. */
function sections(hits, stacked) {
  const divided = [];
  for (const [place, item] of hits.entries()) {
    const month = dateField() ? monthOf(item) || "none" : "";
    if (divided.at(-1)?.month !== month) divided.push({ month, items: [], stacked: [] });
    divided.at(-1).items.push(item);
    divided.at(-1).stacked.push(stacked[place] ?? 0);
  }
  return divided;
}

function Section({ month, items, stacked, state }) {
  const section = useRef(null);
  useEffect(() => {
    if (!month) return undefined;
    const see = ([{ isIntersecting }]) => mark(month, isIntersecting);
    const observer = new IntersectionObserver(see, { rootMargin: "-20% 0px -60%" });
    observer.observe(section.current);
    return () => observer.disconnect();
  }, [month]);
  const heading = month === "none" ? "Without a date" : month && monthName(month);
  return html`
    <section ref=${section}>
      ${heading && html`<h3>${heading}</h3>`}
      <${Grid} items=${items} stacked=${stacked} label=${heading || "Items"} state=${state} />
    </section>
  `;
}

/** Mark the link to the month that is in the middle of the window. */
function mark(month, isSeen) {
  const link = document.querySelector(`[data-month="${month}"]`);
  link?.classList.toggle("seen", isSeen);
  const bar = link?.closest(".months");
  if (!isSeen || !bar) return;
  bar.scrollTo({
    left: link.offsetLeft - bar.clientWidth / 2,
    top: link.offsetTop - bar.clientHeight / 2,
  });
}

function MoreButton({ isBusy, more }) {
  const button = useRef(null);
  useEffect(() => {
    const observer = new IntersectionObserver(([{ isIntersecting }]) => isIntersecting && more(), {
      rootMargin: LOAD_AHEAD,
    });
    observer.observe(button.current);
    return () => observer.disconnect();
  });
  return html`
    <p class="more">
      <button type="button" ref=${button} disabled=${isBusy} onClick=${more}>Show more</button>
    </p>
  `;
}
