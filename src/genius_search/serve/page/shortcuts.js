// Everything by keyboard. Single letters can be switched off, for those whose voice types them.

import { compose, moreLike, thisBut } from "./composer.js";
import { byId, h, modal } from "./elements.js";
import { go } from "./navigation.js";
import { START } from "./state.js";

const OFF = "genius-no-shortcuts";
const KEYS = [
  ["/", "to the search field"],
  ["↵", "search; on a hit: open it"],
  ["↓", "from the search field to the hits"],
  ["← → ↑ ↓", "from hit to hit"],
  ["M", "on a hit: similar"],
  ["B", "on a hit: like this, but …"],
  ["+", "on a hit: add it to the query"],
  ["−", "on a hit: away from it"],
  ["S E A", "to search, explore, add"],
  ["Esc", "close what is open; in the search field: clear it"],
  ["?", "this list"],
];

export function showShortcuts() {
  const off = h("input", { type: "checkbox", id: "letters", checked: !localStorage.getItem(OFF) });
  off.addEventListener("change", () => (off.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, "1")));
  modal(
    "Keyboard",
    { class: "small" },
    h("h2", {}, "Keyboard"),
    h("table", { class: "keys" }, h("tbody", {}, KEYS.map(([name, does]) => h("tr", {}, h("th", { scope: "row" }, name.split(" ").map((one) => h("kbd", {}, one))), h("td", {}, does))))),
    h("p", {}, off, h("label", { for: "letters" }, " Single keys do this")),
    h("p", { class: "fine" }, "Paste a picture anywhere to search by it."),
  );
}

const ACTS = { m: moreLike, b: thisBut, "+": (item) => compose(item, 1), "-": (item) => compose(item, -0.5), "−": (item) => compose(item, -0.5) };
const PLACES = { s: "search", e: "explore", a: "add" };

export function startShortcuts() {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const card = event.target.closest?.(".card");
    if (moved(event, card)) event.preventDefault();
    else if (!event.target.matches("input:not([type=range], [type=radio]), textarea, select") && single(event, card)) event.preventDefault();
  });
}

function single(event, card) {
  if (localStorage.getItem(OFF)) return false;
  const pressed = event.key.toLowerCase();
  if (card?.item && pressed in ACTS) ACTS[pressed](card.item);
  else if (pressed === "/") (byId("search").hidden ? go(START).then(() => byId("text").focus()) : (byId("text").focus(), byId("text").select()));
  else if (pressed === "?") showShortcuts();
  else if (pressed in PLACES) document.querySelector(`nav [data-view="${PLACES[pressed]}"]:not([hidden])`)?.click();
  else return false;
  return true;
}

/** Arrows move in the grid as it is laid out; Esc empties the search field. */
function moved(event, card) {
  if (event.target.id === "text") {
    if (event.key === "Escape" && event.target.value) event.target.value = "";
    else if (event.key === "ArrowDown") return focusOn(document.querySelector("#results .card"));
    else return false;
    return true;
  }
  if (!card || !event.key.startsWith("Arrow")) return false;
  const cards = [...card.parentElement.children];
  const at = cards.indexOf(card);
  const across = cards.findIndex((other) => other.offsetTop > cards[0].offsetTop);
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: across < 0 ? -cards.length : -across, ArrowDown: across < 0 ? cards.length : across }[event.key];
  if (event.key === "ArrowUp" && at + step < 0 && !byId("search").hidden) {
    byId("text").focus();
    return true;
  }
  return focusOn(cards[at + step]);
}

function focusOn(card) {
  const link = card?.querySelector(".open");
  link?.focus();
  return Boolean(link);
}
