// Helpers to create elements, show messages, and format numbers and names.

export const byId = (id) => document.getElementById(id);

/**
 * Create an element with attributes, listeners (`onclick`) and children. Children that are null or
 * false are left out. Texts are inserted as text nodes, so the text of an item cannot inject HTML.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Create an icon from a symbol of index.html. */
export function icon(name) {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  picture.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  picture.append(use);
  return picture;
}

/**
 * Show a modal dialog, which Esc, its button or a click outside closes. The focus then returns to
 * where it was.
 */
export function modal(label, attributes, ...children) {
  const opener = document.activeElement;
  const dialog = h(
    "dialog",
    { "aria-label": label, ...attributes },
    h(
      "button",
      { type: "button", class: "icon close", "aria-label": "Close", onclick: () => dialog.close() },
      icon("close"),
    ),
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

/** Call a function with files that are dropped on the page or pasted. */
export function onFiles(take) {
  const receive = (transfer, event) => {
    const files = [...(transfer?.files ?? [])];
    if (files.length) (event.preventDefault(), take(files));
  };
  const hover = (event, isOver) =>
    document.body.classList.toggle("over", isOver && event.dataTransfer.types.includes("Files"));
  document.addEventListener("paste", (event) => receive(event.clipboardData, event));
  document.addEventListener("dragover", (event) => hover(event, true) && event.preventDefault());
  document.addEventListener("dragleave", (event) => event.relatedTarget || hover(event, false));
  document.addEventListener(
    "drop",
    (event) => (hover(event, false), receive(event.dataTransfer, event)),
  );
}

/** Announce a text to screen readers. */
export function say(text) {
  byId("status").textContent = text;
}

const REMEDIES = {
  403: "Enter another key with the button “Key” above.",
  404: "It may have been deleted, or the link is outdated.",
  413: "Use a smaller picture, or fewer pictures at a time.",
  422: "Change the input and try again.",
  429: "The request will be repeated automatically.",
  500: "This is an error of the server; see its log.",
  504: "A narrower beam is faster; see Settings.",
};

/**
 * Show a problem and its remedy. `again` repeats the failed action, automatically if the server
 * sent Retry-After.
 */
export function tell(problem, again = null, place = byId("notice")) {
  if (problem.name === "AbortError") return;
  if (problem.status === undefined) throw problem; // a bug of this page, for the console
  const retry =
    again &&
    h("button", { type: "button", onclick: () => (place.replaceChildren(), again()) }, "Try again");
  const message = /[.!?]$/.test(problem.message) ? problem.message : `${problem.message}.`;
  place.replaceChildren(
    h(
      "div",
      { class: "notice", role: "alert" },
      h("strong", {}, problem.title),
      h("p", {}, `${message} ${REMEDIES[problem.status] ?? ""}`),
      retry && h("p", { class: "actions" }, retry),
      problem.requestId && h("p", { class: "fine" }, `Request ${problem.requestId}`),
    ),
  );
  if (retry && problem.retryAfter)
    setTimeout(() => retry.isConnected && retry.click(), 1000 * problem.retryAfter);
}

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);
export const items = (number) => `${count(number)} ${number === 1 ? "item" : "items"}`;

/** Format a probability or a share; only 0 and 1 become 0 % and 100 %. */
export function percent(share) {
  if (share > 0 && share < 0.001) return "<0.1\u00a0%";
  if (share > 0 && share < 0.0995) return `${(share * 100).toFixed(1)}\u00a0%`;
  if (share < 1 && share >= 0.995) return ">99\u00a0%";
  return `${Math.round(share * 100)}\u00a0%`;
}

const SINGULAR = { image: "Picture", text: "Text", "image-text": "Picture and text" };
const PLURAL = { image: "Pictures", text: "Texts", "image-text": "Picture and text" };
export const modalityName = (modality) => SINGULAR[modality] ?? modality;
export const modalityNames = (modality) => PLURAL[modality] ?? modality;

/** Return a name for an item where its picture is not shown. */
export function itemName(item) {
  if (!item.text) return `Picture ${item.id}`;
  return item.text.length > 80 ? `${item.text.slice(0, 77)}…` : item.text;
}
