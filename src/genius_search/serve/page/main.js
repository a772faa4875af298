// Start the page: views, links, the history, and the API key.

import { showAdd, take } from "./add.js";
import { key, onKeyWanted } from "./api.js";
import { bring, fill, startComposer } from "./composer.js";
import { byId, h, items, modal, onFiles, tell } from "./elements.js";
import { showItem } from "./item.js";
import { showResults } from "./results.js";
import {
  allIndexes,
  arrive,
  chosen,
  current,
  go,
  learnIndexes,
  onShow,
  read,
  START,
} from "./state.js";

const VIEWS = {
  search: (state) => (fill(state), showResults(state)),
  add: showAdd,
};
let shown = null;

async function show(state) {
  const before = shown;
  shown = state.view;
  byId("notice").replaceChildren();
  for (const view of Object.keys(VIEWS)) byId(view).hidden = view !== state.view;
  for (const link of document.querySelectorAll("nav [data-view]")) {
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  nameIndex();
  document.title =
    state.view === "add" ? "Add items · genius" : state.text ? `${state.text} · genius` : "genius";
  const done = VIEWS[state.view](state);
  if (before && before !== state.view && !state.item) byId(`${state.view}-title`)?.focus();
  await Promise.all([done, showItem(state)]);
}

function nameIndex() {
  const index = chosen();
  const hasChoice = allIndexes().length > 1;
  byId("size").textContent = hasChoice
    ? items(index.items)
    : `${index.name} · ${items(index.items)}`;
  document.querySelector('nav [data-view="add"]').hidden = !index.writable;
  const select = byId("indexes").querySelector("select");
  byId("indexes").hidden = !hasChoice;
  select.replaceChildren(...allIndexes().map(({ name }) => h("option", { value: name }, name)));
  select.value = index.name;
}

function askForKey(wasRefused) {
  return new Promise((resolve) => {
    const input = h("input", {
      type: "password",
      id: "api-key",
      autocomplete: "off",
      required: true,
      "aria-describedby": "api-key-about",
    });
    const use = (event) => {
      event.preventDefault();
      key.set(input.value.trim());
      dialog.close("given");
    };
    const forget = () => {
      key.set(null);
      location.reload();
    };
    const dialog = modal(
      "API key",
      { class: "small" },
      h("h2", {}, wasRefused ? "The key was not accepted" : "This server requires an API key"),
      h(
        "p",
        { id: "api-key-about" },
        "The operator of the server can give you one. The key is stored in this tab until you close it, and sent to this server only.",
      ),
      h(
        "form",
        { onsubmit: use },
        h("label", { for: "api-key" }, "API key"),
        input,
        h(
          "div",
          { class: "actions" },
          h("button", { class: "primary" }, "Use this key"),
          key.get() && h("button", { type: "button", onclick: forget }, "Forget the current key"),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      byId("key").hidden = !key.get();
      resolve(dialog.returnValue === "given");
    });
    input.focus();
  });
}

/** Follow links within the page without loading it again, unless they open a new tab. */
function follow(event) {
  const link = event.target.closest("a[href^='./']");
  if (
    !link ||
    "leaves" in link.dataset ||
    event.defaultPrevented ||
    event.button ||
    event.metaKey ||
    event.ctrlKey ||
    event.shiftKey ||
    event.altKey
  )
    return;
  event.preventDefault();
  const state = current();
  const next = read(new URL(link.href), link.dataset.view ? null : { picture: state.picture });
  go({ ...next, index: next.index ?? state.index }, { opened: Boolean(next.item) && !state.item });
  if (link.classList.contains("brand")) byId("text").focus();
}

async function learn() {
  try {
    await learnIndexes();
  } catch (problem) {
    tell(problem, learn);
    return;
  }
  if (!allIndexes().length) {
    tell({
      status: 0,
      title: "This server has no index",
      message: "Start it with the folder of an index: genius serve photos.index",
    });
    return;
  }
  await arrive(read(location, history.state));
  const { view, text, item } = current();
  const isFree = document.activeElement === document.body; // do not move a focus that the user has set
  if (isFree && view === "search" && !text && !item && matchMedia("(hover: hover)").matches)
    byId("text").focus();
}

onKeyWanted(askForKey);
onShow(show);
document.addEventListener("click", follow);
window.addEventListener("popstate", (event) => arrive(read(location, event.state)));
byId("key").hidden = !key.get();
byId("key").addEventListener("click", async () => (await askForKey(false)) && learn());
byId("indexes")
  .querySelector("select")
  .addEventListener("change", (event) =>
    go({ ...START, view: current().view, index: event.target.value }),
  );
document.addEventListener("keydown", (event) => {
  if (
    event.key !== "/" ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    event.target.matches("input, textarea, select")
  )
    return;
  if (document.querySelector("dialog[open]")) return;
  event.preventDefault();
  (byId("search").hidden ? go(START) : Promise.resolve()).then(() => byId("text").select());
});
startComposer();
onFiles((files) => (byId("add").hidden ? bring : take)(files));
learn();
