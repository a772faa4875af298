// An item as a card: its picture, its words, or both; and where a click on it leads.

import { dragItem } from "./composer.js";
import { h } from "./elements.js";
import { current } from "./navigation.js";
import { picture } from "./pictures.js";
import { address } from "./state.js";
import { itemName } from "./words.js";

/** What can be seen of an item. */
export function face(item) {
  return [
    item.image && h("span", { class: "frame" }, picture(item.image, "")),
    item.text && h("span", { class: item.image ? "text" : "text alone" }, item.text),
    !item.image && !item.text && h("span", { class: "text alone" }, item.id),
  ];
}

/** A link to an item; what else the card says stands below it. */
export function card(item, { label = itemName(item), state = current() } = {}, ...rest) {
  const element = h(
    "li",
    { class: "card", "data-id": item.id },
    h("a", { class: "open", href: address({ ...state, item: item.id }), "aria-label": label, draggable: "false" }, face(item)),
    ...rest,
  );
  element.item = item;
  dragItem(element, item);
  return element;
}
