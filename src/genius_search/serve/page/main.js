// Start the page: views, links, the history, and the API key.

import { AddView, take } from "./add.js";
import { key, onKeyWanted } from "./api.js";
import { Browse } from "./browse.js";
import { bring, Composer } from "./composer.js";
import { Icon, items, Modal, ProblemNotice } from "./elements.js";
import { html, render, useEffect, useRef } from "./preact.js";
import { Results } from "./results.js";
import {
  allIndexes, arrive, chosen, current, currentNotice, go, hasQuery, learnIndexes, notify, onShow,
  read, START,
} from "./state.js";
import { Viewer } from "./viewer.js";

const root = document.getElementById("page");
const box = () => document.getElementById("text");
let keyQuestion = null; // a question for the API key: whether one was refused, and what is next

function draw() {
  render(html`<${Page} state=${current()} />`, root);
}

function Page({ state }) {
  const notice = currentNotice();
  const isReady = allIndexes().length > 0;
  return html`
    <${Top} state=${state} isReady=${isReady} />
    <main id="main" tabindex="-1">
      <div id="notice">${notice && html`<${ProblemNotice} ...${notice} />`}</div>
      ${isReady && html`<${View} state=${state} />`}
    </main>
    <footer><p>Served from this machine. The page loads nothing from other sites.</p></footer>
    ${isReady && state.item && html`<${Viewer} state=${state} />`}
    ${keyQuestion && html`<${KeyDialog} ...${keyQuestion} />`}
  `;
}

function View({ state }) {
  const before = useRef(null);
  const isAdd = state.view === "add";
  useEffect(() => {
    document.title = [isAdd ? "Add items" : state.text, "genius"].filter(Boolean).join(" · ");
  });
  useEffect(() => {
    if (before.current && !state.item) document.getElementById(`${state.view}-title`)?.focus();
    before.current = state.view;
  }, [state.view]);
  if (isAdd) return html`<section id="add" aria-labelledby="add-title"><${AddView} /></section>`;
  return html`
    <section id="search" aria-labelledby="search-title" key=${chosen().name}>
      <h1 id="search-title" class="unseen" tabindex="-1">Search</h1>
      <${Composer} state=${state} />
      ${hasQuery(state) ? html`<${Results} state=${state} />` : html`<${Browse} state=${state} />`}
    </section>
  `;
}

function Top({ state, isReady }) {
  const currently = (view) => (state.view === view ? "page" : null);
  const link = (view, name, href) =>
    html`<a href=${href} data-view=${view} aria-current=${currently(view)}>${name}</a>`;
  return html`
    <header class="top">
      <a class="brand" href="./" data-view="search" aria-label="genius, new search">
        <i /><i /><i /><i /><span>genius</span>
      </a>
      <nav aria-label="Views">
        ${link("search", "Search", "./")}
        ${isReady && chosen().writable && link("add", "Add", "./?view=add")}
      </nav>
      <div class="about">
        ${isReady && html`<${IndexChoice} state=${state} />`}
        ${key.get() &&
        html`<button type="button" class="quiet" onClick=${changeKey}>
          <${Icon} name="key" />Key
        </button>`}
      </div>
    </header>
  `;
}

function IndexChoice({ state }) {
  const index = chosen();
  const size = items(index.items);
  if (allIndexes().length === 1) return html`<span id="size">${index.name} · ${size}</span>`;
  const choose = ({ target }) => go({ ...START, view: state.view, index: target.value });
  return html`
    <label class="indexes">
      <span class="unseen">Index</span>
      <select value=${index.name} onChange=${choose}>
        ${allIndexes().map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
    </label>
    <span id="size">${size}</span>
  `;
}

/** Ask for an API key; return whether there is a new one. */
function askForKey(wasRefused) {
  return new Promise((resolve) => {
    const answer = (isNew) => {
      keyQuestion = null;
      draw();
      resolve(isNew);
    };
    keyQuestion = { wasRefused, answer };
    draw();
  });
}

async function changeKey() {
  if (await askForKey(false)) learn();
}

function KeyDialog({ wasRefused, answer }) {
  const input = useRef(null);
  useEffect(() => input.current.focus(), []);
  const use = (event) => {
    event.preventDefault();
    key.set(input.current.value.trim());
    answer(true);
  };
  const forget = () => {
    key.set(null);
    location.reload();
  };
  return html`
    <${Modal} label="API key" class="small" onClose=${() => answer(false)}>
      <h2>${wasRefused ? "The key was not accepted" : "This server requires an API key"}</h2>
      <p id="api-key-about">
        The operator of the server can give you one. The key is stored in this tab until you close
        it, and sent to this server only.
      </p>
      <form onSubmit=${use}>
        <label for="api-key">API key</label>
        <input
          id="api-key"
          ref=${input}
          type="password"
          autocomplete="off"
          required
          aria-describedby="api-key-about"
        />
        <div class="actions">
          <button class="primary">Use this key</button>
          ${key.get() &&
          html`<button type="button" onClick=${forget}>Forget the current key</button>`}
        </div>
      </form>
    <//>
  `;
}

/** Follow links within the page without loading it again, unless they open a new tab. */
function follow(event) {
  const link = event.target.closest("a[href^='./']");
  const hasModifier = event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
  if (!link || "leaves" in link.dataset || event.defaultPrevented || event.button || hasModifier)
    return;
  event.preventDefault();
  const state = current();
  const next = read(new URL(link.href), link.dataset.view ? null : { picture: state.picture });
  go({ ...next, index: next.index ?? state.index }, { opened: Boolean(next.item) && !state.item });
  if (next.month !== state.month) scrollTo(0, 0);
  if (link.classList.contains("brand")) box().focus();
}

/** Call a function with files that are dropped on the page or pasted. */
function onFiles(use) {
  const receive = (transfer, event) => {
    const files = [...(transfer?.files ?? [])];
    if (!files.length || !allIndexes().length) return;
    event.preventDefault();
    use(files);
  };
  const hover = (event, isOver) =>
    document.body.classList.toggle("over", isOver && event.dataTransfer.types.includes("Files"));
  document.addEventListener("paste", (event) => receive(event.clipboardData, event));
  document.addEventListener("dragover", (event) => {
    if (hover(event, true)) event.preventDefault();
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || hover(event, false));
  document.addEventListener("drop", (event) => {
    hover(event, false);
    receive(event.dataTransfer, event);
  });
}

/** Move to the query with the key “/”. */
function onSlash(event) {
  const hasModifier = event.ctrlKey || event.metaKey || event.altKey;
  if (event.key !== "/" || hasModifier || event.target.matches("input, textarea, select")) return;
  if (document.querySelector("dialog[open]")) return;
  event.preventDefault();
  if (!box()) go(START);
  box()?.select();
}

async function learn() {
  try {
    await learnIndexes();
  } catch (problem) {
    notify(problem, learn);
    return;
  }
  if (!allIndexes().length) {
    const message = "Start it with the folder of an index: genius serve photos.index";
    notify({ status: 0, title: "This server has no index", message });
    return;
  }
  arrive(read(location, history.state));
  const { view, text, item } = current();
  const isFree = document.activeElement === document.body; // do not move a focus of the user
  if (isFree && view === "search" && !text && !item && matchMedia("(hover: hover)").matches)
    box().focus({ preventScroll: true });
}

onKeyWanted(askForKey);
onShow(draw);
document.addEventListener("click", follow);
document.addEventListener("keydown", onSlash);
window.addEventListener("popstate", (event) => arrive(read(location, event.state)));
onFiles((files) => (current().view === "add" ? take : bring)(files));
draw();
learn();
