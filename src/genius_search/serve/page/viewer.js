// The viewer of one item: its picture, which can be enlarged, its text and fields, and what can be
// done with it. The arrow keys lead to the items before and after it.

import { ask, key, pictureUrl } from "./api.js";
import { ItemDetails } from "./details.js";
import {
  IconButton, isVideo, itemName, matchingLines, Modal, originalPath, Picture, ProblemNotice, say,
  useRequest,
} from "./elements.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { chosen, closeItem, current, currentEdition, go, shownItems } from "./state.js";

const MAX_ZOOM = 8;
const ZOOM_STEP = 1.5;

export function Viewer({ state }) {
  const [zoom, setZoom] = useState(1);
  const { items, more } = shownItems();
  const place = items.findIndex((item) => item.id === state.item);
  const shown = items[place];
  const name = JSON.stringify([chosen().name, state.item, currentEdition()]);
  const { value, problem, isBusy } = useRequest(name, (signal) =>
    ask("v1/items", { query: { index: chosen().name, id: state.item }, signal }),
  );
  // The hit knows the best moment of a video, and its picture shows it.
  const item = isBusy || problem ? shown : { ...value, ...shown, ...details(value) };
  useEffect(() => {
    setZoom(1);
    if (more && place === items.length - 1) more();
    if (shown) say(`${itemName(shown)}, ${place + 1} of ${items.length}`);
  }, [state.item]);
  useEffect(() => () => setTimeout(focusCard, 0, current().item ?? lastItem), []);
  lastItem = state.item;
  const step = (by) => {
    const next = items[place + by];
    if (shown && next) go({ item: next.id }, { replace: true });
  };
  const magnify = (factor) => setZoom(Math.min(MAX_ZOOM, Math.max(1, zoom * factor)));
  const keys = {
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    "+": () => magnify(ZOOM_STEP),
    "=": () => magnify(ZOOM_STEP),
    "-": () => magnify(1 / ZOOM_STEP),
    0: () => setZoom(1),
  };
  const press = (event) => {
    const isOther = event.target.closest("dialog") !== event.currentTarget;
    const isTaken = isOther || event.target.matches("input, textarea, select, video");
    const scrolls = zoom > 1 && event.key.startsWith("Arrow") && event.target.matches(".stage");
    if (isTaken || scrolls || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  };
  return html`
    <${Modal} label="Item" class="viewer" onClose=${closeItem} onKeyDown=${press}>
      <div class="stage-frame">
        ${item && isVideo(item) && html`<${VideoStage} key=${item.id} item=${item} />`}
        ${item &&
        !isVideo(item) &&
        html`<${Stage} key=${item.id} item=${item} zoom=${zoom} setZoom=${setZoom} />`}
        <div class="tools">
          ${shown &&
          html`
            <${StepButton} name="left" label="Previous item" by=${-1} step=${step} place=${place} />
            <${StepButton} name="right" label="Next item" by=${1} step=${step} place=${place} />
          `}
          ${item?.image &&
          !isVideo(item) &&
          html`
            <${IconButton} name="minus" label="Zoom out" onClick=${() => magnify(1 / ZOOM_STEP)} />
            <output aria-label="Zoom">${Math.round(zoom * 100)} %</output>
            <${IconButton} name="plus" label="Zoom in" onClick=${() => magnify(ZOOM_STEP)} />
          `}
        </div>
      </div>
      <div class="about-item">
        ${problem && html`<${ProblemNotice} problem=${problem} />`}
        ${item && html`<${ItemDetails} key=${item.id} item=${item} state=${state} />`}
      </div>
    <//>
  `;
}

/** Return what the item itself has and its hit has not. */
const details = ({ codes, picture_text }) => ({ codes, picture_text });

let lastItem = null;

/** A button to the item before or after. It keeps the focus where there is no further item. */
function StepButton({ name, label, by, step, place }) {
  const isLast = !shownItems().items[place + by];
  return html`<${IconButton}
    name=${name}
    label=${label}
    aria-disabled=${isLast ? "true" : null}
    onClick=${() => step(by)}
  />`;
}

/** Focus the card of the item that was shown last, unless somebody has gone on to type. */
function focusCard(id) {
  if (document.querySelector("dialog[open]") || document.activeElement?.matches("input")) return;
  document.querySelector(`.card[data-id="${CSS.escape(id)}"] .open`)?.focus();
}

/** The item itself. A picture is as large as fits, and scrolls if it is enlarged. */
function Stage({ item, zoom, setZoom }) {
  const stage = useRef(null);
  const [size, setSize] = useState({ width: 4, height: 3 });
  const center = useRef(null); // of the visible part, as a share of the whole
  useEffect(() => {
    const { current: element } = stage;
    if (!element) return; // a text
    const share = center.current ?? { x: 0.5, y: 0.5 };
    element.scrollTo(
      share.x * element.scrollWidth - element.clientWidth / 2,
      share.y * element.scrollHeight - element.clientHeight / 2,
    );
  }, [zoom]);
  if (!item.image)
    return html`<div class="stage text" tabindex="0" role="region" aria-label="Text">
      <p>${item.text}</p>
    </div>`;
  const remember = ({ target }) => {
    center.current = {
      x: (target.scrollLeft + target.clientWidth / 2) / target.scrollWidth,
      y: (target.scrollTop + target.clientHeight / 2) / target.scrollHeight,
    };
  };
  const toggle = ({ offsetX, offsetY, target }) => {
    if (zoom === 1)
      center.current = { x: offsetX / target.clientWidth, y: offsetY / target.clientHeight };
    setZoom(zoom === 1 ? ZOOM_STEP * ZOOM_STEP : 1);
  };
  const drag = (event) => {
    if (event.buttons === 1 && event.pointerType === "mouse")
      event.currentTarget.scrollBy(-event.movementX, -event.movementY);
  };
  const style = {
    "--zoom": zoom,
    "--ratio": size.width / size.height,
    "--natural": `${size.width}px`,
  };
  return html`
    <div
      class=${zoom > 1 ? "stage zoomed" : "stage"}
      ref=${stage}
      tabindex="0"
      role="region"
      aria-label="Picture"
      onScroll=${remember}
      onDblClick=${toggle}
      onPointerMove=${drag}
    >
      <div class="sheet" style=${style}>
        <${FullPicture} item=${item} isWhole=${zoom > 1} onSize=${setSize} />
        ${matchingLines(item).map(({ words, box: [left, top, right, bottom] }) => {
          const [width, height] = [right - left, bottom - top];
          const share = (part) => `${100 * part}%`;
          const area = { left, top, width, height };
          const edges = Object.entries(area).map(([edge, part]) => [edge, share(part)]);
          return html`<mark title=${words} style=${Object.fromEntries(edges)} />`;
        })}
      </div>
    </div>
  `;
}

/** The picture, or the original, which shows more, once it is enlarged. */
function FullPicture({ item, isWhole, onSize }) {
  const [isReady, setReady] = useState(false); // whether the original can be shown
  const learnSize = ({ naturalWidth: width, naturalHeight: height }) => onSize({ width, height });
  return html`
    <${Picture} path=${item.image} size=${1024} alt=${itemName(item)} onLoad=${learnSize} />
    ${isWhole &&
    html`<span class="original" hidden=${!isReady}>
      <${Picture}
        path=${originalPath(item)}
        size=${0}
        loading="eager"
        onLoad=${() => setReady(true)}
      />
    </span>`}
  `;
}

/** A video, which plays from the best moment of the hit. */
function VideoStage({ item }) {
  const video = useRef(null);
  const [url, setUrl] = useState(key.get() ? null : originalPath(item));
  const [isRefused, setRefused] = useState(false);
  const seek = () => (video.current.currentTime = item.moment ?? 0);
  useEffect(() => {
    if (!url) pictureUrl(originalPath(item)).then(setUrl, () => setRefused(true));
  }, []);
  useEffect(() => {
    if (video.current?.readyState) seek();
  }, [item.moment]);
  if (isRefused)
    return html`<div class="stage">
      <${Picture} path=${item.image} size=${1024} alt=${itemName(item)} />
      <p class="notice">This browser cannot play the video; open the original.</p>
    </div>`;
  return html`<video
    class="stage"
    ref=${video}
    src=${url}
    controls
    preload="metadata"
    aria-label=${itemName(item)}
    onLoadedMetadata=${seek}
    onError=${() => setRefused(true)}
  />`;
}
