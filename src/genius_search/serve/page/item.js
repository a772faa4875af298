// The panel of one item: its picture and text, actions, and its path through the codes.

import { ask, call, key } from "./api.js";
import { compose, moreLike, thisBut } from "./composer.js";
import { count, h, itemName, items, modal, modalityName, percent, say, tell } from "./elements.js";
import { face, forgetAnswer, question } from "./results.js";
import { chosen, closeItem, current, go, hasQuery, learnIndexes } from "./state.js";

let sheet = null;
let shownId = null;

/** Show the item of the state, or close the panel if there is none. */
export async function showItem(state) {
  if (state.item === shownId) return;
  shownId = state.item;
  const before = sheet;
  sheet = null;
  before?.close();
  if (!state.item) return;
  const body = h("div", { class: "body" });
  const opened = (sheet = modal("Item", { class: "sheet" }, body));
  opened.addEventListener(
    "close",
    () => sheet === opened && ((sheet = null), (shownId = null), closeItem()),
  );
  try {
    const item = await ask("v1/items", { query: { index: chosen().name, id: state.item } });
    if (sheet === opened) draw(body, item, state);
  } catch (problem) {
    tell(problem, null, body);
  }
}

function draw(body, item, state) {
  const then = (act) => () => {
    leave();
    act(item);
  };
  const fields = Object.entries(flat(item.fields ?? {}));
  body.replaceChildren(
    h("div", { class: "seen" }, face(item, 1024)),
    h("h2", { class: "id" }, item.id),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", class: "primary", onclick: then(moreLike) }, "Similar"),
      h("button", { type: "button", onclick: then(thisBut) }, "Like this, but …"),
      h("button", { type: "button", onclick: then((shown) => compose(shown, 1)) }, "With this"),
      h(
        "button",
        { type: "button", onclick: then((shown) => compose(shown, -0.5)) },
        "Without this",
      ),
    ),
    h(
      "div",
      { class: "actions" },
      item.image && [
        original(item, "Open the original", { target: "_blank" }),
        original(item, "Download", { download: fileName(item) }),
      ],
      chosen().writable &&
        h(
          "button",
          { type: "button", class: "danger", onclick: () => confirmDelete(item) },
          "Delete",
        ),
    ),
    fields.length
      ? h(
          "dl",
          { class: "fields" },
          fields.map(([name, value]) =>
            h("div", {}, h("dt", {}, name), h("dd", {}, String(value))),
          ),
        )
      : "",
    h(
      "details",
      {
        class: "path",
        ontoggle: ({ target }) =>
          target.open && hasQuery(state) && explain(target.lastChild, item, state),
      },
      h("summary", {}, "Details"),
      h(
        "p",
        { class: "fine" },
        `${modalityName(item.modality)}, codes `,
        h("span", { class: "code" }, item.codes.join(" ")),
      ),
      h("section", { "aria-label": "Path through the codes" }),
    ),
  );
}

const fileName = (item) => item.id.split("/").at(-1);

/**
 * Create a link to the original file of a picture. A link cannot send a key, so with a key, the
 * file is fetched first.
 */
function original(item, label, attributes) {
  const path = `v1/items/original?${new URLSearchParams({ index: chosen().name, id: item.id })}`;
  const fetchFirst = async (event) => {
    if (!key.get() || event.target.href.startsWith("blob:")) return;
    event.preventDefault();
    try {
      event.target.href = URL.createObjectURL(await (await call(path)).blob());
      event.target.click();
    } catch (problem) {
      tell(problem);
    }
  };
  return h(
    "a",
    { class: "button", href: path, onclick: fetchFirst, "data-leaves": true, ...attributes },
    label,
  );
}

/** Close the panel without going back in the history, since an action opens another view. */
function leave() {
  const opened = sheet;
  sheet = null;
  shownId = null;
  opened?.close();
}

function flat(fields, before = "") {
  return Object.entries(fields).reduce(
    (found, [name, value]) =>
      value !== null && typeof value === "object" && !Array.isArray(value)
        ? { ...found, ...flat(value, `${before}${name}.`) }
        : { ...found, [before + name]: Array.isArray(value) ? value.join(", ") : value },
    {},
  );
}

async function explain(place, item, state) {
  place.replaceChildren(
    h("h3", {}, "Path through the codes"),
    h("p", { class: "fine", "aria-busy": "true" }, "Loading …"),
  );
  try {
    const { json, files } = await question(state);
    const explanation = await ask("v1/explain", {
      method: "POST",
      json: { ...json, id: item.id },
      files,
    });
    place.replaceChildren(
      h("h3", {}, "Path through the codes"),
      h("p", { class: "outcome" }, outcome(explanation)),
      h(
        "p",
        { class: "fine" },
        `The codes of the item, from coarse to fine. ${explanation.levels[0].probability === null ? "A longer bar means that fewer codes are closer to the query." : "A bar shows the probability of a code, given the query and the codes before it."}`,
      ),
      h(
        "ol",
        { class: "levels" },
        chosenLevels(explanation.levels).map((level) => levelRow(level, item)),
      ),
    );
  } catch (problem) {
    tell(problem, () => explain(place, item, state), place);
  }
}

/** Describe the rank of the item, or why it has none. */
function outcome({ is_allowed: isAllowed, rank, touched, beam }) {
  if (!isAllowed) return "The filters or the selected modality exclude this item.";
  if (rank !== null)
    return `Rank ${count(rank)} of ${items(touched)} that the search ranked with a beam of ${count(beam)}.`;
  return `Not among the ${items(touched)} that the search ranked; a beam wider than ${count(beam)} may reach it.`;
}

/** Return the levels up to the first with a single item; below it, there is nothing to choose. */
function chosenLevels(levels) {
  const alone = levels.findIndex((level) => level.items === 1) + 1;
  return alone ? levels.slice(0, alone) : levels;
}

function levelRow({ level, code, items: below, probability, rank, num_siblings: siblings }, item) {
  const number =
    probability === null ? `${count(rank)} of ${count(siblings)}` : percent(probability);
  return h(
    "li",
    { title: `${items(below)} with these codes` },
    h("span", { class: "name" }, level === 0 ? "modality" : `level ${level}`),
    h("b", { class: "code" }, level === 0 ? modalityName(item.modality) : code),
    h("span", { class: "meter", "--share": probability ?? (siblings - rank + 1) / siblings }),
    h("span", { class: "number" }, number),
  );
}

function confirmDelete(item) {
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Keep it");
  const dialog = modal(
    "Delete this item?",
    { class: "small" },
    h("h2", {}, "Delete this item?"),
    h(
      "p",
      {},
      `Searches will no longer find “${itemName(item)}”. If it comes from a file on the server, the file stays, and can be added again. An item that was added on this page is lost.`,
    ),
    h(
      "div",
      { class: "actions" },
      h(
        "button",
        { type: "button", class: "danger", onclick: () => remove(item, dialog) },
        "Delete",
      ),
      cancel,
    ),
  );
  cancel.focus();
}

async function remove(item, dialog) {
  try {
    await ask("v1/items", { method: "DELETE", query: { index: chosen().name, id: item.id } });
  } catch (problem) {
    dialog.close();
    tell(problem);
    leave();
    go({ item: null }, { replace: true });
    return;
  }
  dialog.close();
  leave();
  forgetAnswer();
  await learnIndexes().catch(tell);
  await go(
    { item: null, parts: current().parts.filter((part) => part.value !== item.id) },
    { replace: true },
  );
  say(`${item.id} was deleted.`);
}
