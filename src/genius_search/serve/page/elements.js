// Components that several parts of the page use, and how numbers, dates and names are written.

import { key, pictureAddress, pictureUrl } from "./api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact.js";
import { chosen, current, dateField, dateFields } from "./state.js";

/** Draw an icon from a symbol of index.html. */
export const Icon = ({ name }) =>
  html`<svg aria-hidden="true"><use href=${`#i-${name}`} /></svg>`;

/** A button with an icon alone, which `label` names. */
export const IconButton = ({ name, label, ...attributes }) => html`
  <button type="button" class="icon" aria-label=${label} title=${label} ...${attributes}>
    <${Icon} name=${name} />
  </button>
`;

/** A modal dialog. Esc, its button and a click outside close it; the focus then returns. */
export function Modal({ label, onClose, children, ...attributes }) {
  const dialog = useRef(null);
  const close = useRef(onClose);
  close.current = onClose;
  useLayoutEffect(() => {
    const element = dialog.current;
    const closed = () => close.current(element.returnValue);
    element.addEventListener("close", closed);
    element.showModal();
    return () => {
      element.removeEventListener("close", closed);
      element.close();
    };
  }, []);
  return html`
    <dialog
      ref=${dialog}
      aria-label=${label}
      onClick=${(event) => event.target === dialog.current && dialog.current.close()}
      ...${attributes}
    >
      <button
        type="button"
        class="icon close"
        aria-label="Close"
        onClick=${() => dialog.current.close()}
      >
        <${Icon} name="close" />
      </button>
      ${children}
    </dialog>
  `;
}

/** The picture of an item. An <img> cannot send a key, so with a key its bytes are fetched. */
export function Picture({ path, alt = "", size = 512, loading = "lazy", onLoad }) {
  const [url, setUrl] = useState(null);
  const [isGone, setGone] = useState(false);
  const hasKey = Boolean(key.get());
  useEffect(() => {
    let isCurrent = true;
    const whileCurrent = (act) => (value) => isCurrent && act(value);
    setGone(false);
    if (hasKey)
      pictureUrl(path, size).then(
        whileCurrent(setUrl),
        whileCurrent(() => setGone(true)),
      );
    return () => (isCurrent = false);
  }, [path, size, hasKey]);
  if (isGone) return html`<span class="gone">The picture cannot be shown</span>`;
  return html`<img
    src=${hasKey ? url : pictureAddress(path, size)}
    alt=${alt}
    loading=${loading}
    decoding="async"
    draggable=${false}
    onLoad=${(event) => onLoad?.(event.target)}
    onError=${() => setGone(true)}
  />`;
}

/**
 * Load a value again whenever the name of the request changes; null requests nothing. The last
 * value stays until the next one has arrived.
 */
export function useRequest(name, load) {
  const [answer, setAnswer] = useState({ name: null });
  useEffect(() => {
    if (name === null || answer.name === name) return undefined;
    const controller = new AbortController();
    const { signal } = controller; // an older response must not replace a newer one
    load(signal).then(
      (value) => signal.aborted || setAnswer({ name, value }),
      (problem) => {
        if (signal.aborted) return;
        if (problem.status === undefined) throw problem; // a bug of this page, for the console
        setAnswer({ name, problem });
      },
    );
    return () => controller.abort();
  }, [name, answer.name]);
  return {
    value: answer.value,
    problem: answer.name === name ? answer.problem : undefined,
    isBusy: name !== null && answer.name !== name,
    again: () => setAnswer({ name: null, value: answer.value }),
  };
}

const REMEDIES = {
  403: "Enter another key with the button “Key” above.",
  404: "It may have been deleted, or the link is outdated.",
  413: "Use a smaller picture, or fewer pictures at a time.",
  422: "Change the input and try again.",
  429: "The request will be repeated automatically.",
  500: "This is an error of the server; see its log.",
  504: "Fewer filters, or a narrower beam under Expert, are faster.",
};

/**
 * A problem and its remedy. `again` repeats the failed action, automatically if the server sent
 * Retry-After.
 */
export function ProblemNotice({ problem, again }) {
  useEffect(() => {
    if (!again || !problem.retryAfter) return undefined;
    const timer = setTimeout(again, 1000 * problem.retryAfter);
    return () => clearTimeout(timer);
  }, [problem]);
  const message = /[.!?]$/.test(problem.message) ? problem.message : `${problem.message}.`;
  return html`
    <div class="notice" role="alert">
      <strong>${problem.title}</strong>
      <p>${message} ${REMEDIES[problem.status] ?? ""}</p>
      ${again && html`<button type="button" onClick=${again}>Try again</button>`}
      ${problem.requestId && html`<p class="fine">Request ${problem.requestId}</p>`}
    </div>
  `;
}

/** Announce a text to screen readers. */
export function say(text) {
  document.getElementById("status").textContent = text;
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

const day = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeZone: "UTC" });
const month = new Intl.DateTimeFormat("en", { month: "long", year: "numeric", timeZone: "UTC" });

/** Return the month of an item, such as 2024-05; an empty text without a date. */
export const monthOf = (item) =>
  /^\d{4}-\d\d/.exec(item.fields?.[dateField()] ?? "")?.[0] ?? "";
export const monthName = (text) => month.format(new Date(`${text}-01T00:00Z`));

/** Return the date of an item for people; an empty text without one. */
export function dateOf(item) {
  const field = [dateField(), ...dateFields()].find((name) => item.fields?.[name]);
  const value = String(item.fields?.[field] ?? "");
  const [date] = /^\d{4}-\d\d-\d\d/.exec(value) ?? [];
  return date ? day.format(new Date(`${date}T00:00Z`)) : value;
}

const SINGULAR = { image: "Picture", text: "Text", "image-text": "Picture and text" };
const PLURAL = { image: "Pictures", text: "Texts", "image-text": "Picture and text" };
export const modalityName = (modality) => SINGULAR[modality] ?? modality;
export const modalityNames = (modality) => PLURAL[modality] ?? modality;

export const isVideo = (item) => item.fields?.kind === "video";

/** Format seconds of a video: 1:07:03, or 7:03. */
export function duration(seconds) {
  const parts = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor);
  const padded = parts.map((part) => `${part}`.padStart(2, "0"));
  return padded.slice(parts[0] ? 0 : 1).join(":").replace(/^0/, "");
}

/** Return the lines of text in a picture, with their boxes. */
export const pictureLines = (item) => item.picture_text ?? [];

/** Return the lines of text in a picture with a word of the query. */
export function matchingLines(item) {
  const wordsOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}]{3,}|\p{N}+/gu) ?? [];
  const asked = wordsOf(current().text);
  return pictureLines(item).filter(({ words }) =>
    wordsOf(words).some((word) => asked.some((start) => word.startsWith(start))),
  );
}

/** Return the path of the original file of an item on the server. */
export const originalPath = (item) =>
  `v1/items/original?${new URLSearchParams({ index: chosen().name, id: item.id })}`;

/** Return the last part of an id, which is the name of a file in a folder. */
export const fileName = (item) => item.id.split("/").at(-1);

/** Return a name for an item where its picture is not shown. */
export function itemName(item) {
  if (!item.text) return `Picture ${item.id}`;
  return item.text.length > 80 ? `${item.text.slice(0, 77)}…` : item.text;
}
