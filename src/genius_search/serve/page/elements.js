// Elements without markup: text never becomes HTML, so an item's words cannot become part of the page.

/** An element with attributes, listeners (`onclick`) and children; null and false children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** One of the symbols of index.html. */
export function icon(name) {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  picture.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  picture.append(use);
  return picture;
}

export const byId = (id) => document.getElementById(id);

/** A modal that closes by Esc, its button or a click beside it, and gives the focus back. */
export function modal(label, attributes, ...children) {
  const opener = document.activeElement;
  const dialog = h(
    "dialog",
    { "aria-label": label, ...attributes },
    h("button", { type: "button", class: "icon close", "aria-label": "Close", onclick: () => dialog.close() }, icon("close")),
    ...children,
  );
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (opener?.isConnected) opener.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
