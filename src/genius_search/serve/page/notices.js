// What happened, and what to do: errors on the page, short news for screen readers.

import { byId, h } from "./elements.js";

const REMEDIES = {
  400: "Change the search and try again.",
  403: "Use a key that may: the button “Key”, above.",
  404: "It may have been deleted, or the address is old.",
  413: "Use a smaller picture, or fewer at once.",
  422: "Change what was given and try again.",
  429: "It is asked again by itself.",
  500: "It is a fault of the server; its log says more.",
  503: "It comes back when it is started again.",
  504: "A narrower beam answers sooner: see Settings.",
};
let countdown = 0;

/** Said by a screen reader when it is free. */
export function say(text) {
  byId("status").textContent = text;
}

export function clearNotice() {
  clearInterval(countdown);
  byId("notice").replaceChildren();
}

/** Show a problem with what to do about it; `again` repeats what failed. */
export function tell(problem, again = null, place = byId("notice")) {
  if (problem.name === "AbortError") return;
  if (problem.status === undefined) throw problem; // a fault of this page belongs in its console
  clearInterval(countdown);
  const retry = again && h("button", { type: "button", onclick: () => (place.replaceChildren(), again()) }, "Try again");
  place.replaceChildren(
    h(
      "div",
      { class: "notice", role: "alert" },
      h("strong", {}, problem.title),
      h("p", {}, problem.message === problem.title ? "" : `${sentence(problem.message)} `, REMEDIES[problem.status] ?? ""),
      retry && h("p", { class: "actions" }, retry),
      problem.requestId && h("p", { class: "fine" }, `Request ${problem.requestId}`),
    ),
  );
  if (retry && problem.retryAfter !== null) countDown(retry, Math.ceil(problem.retryAfter));
}

function sentence(text) {
  const whole = text.trim();
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/** The server said when to come back: the button does it by itself then. */
function countDown(button, seconds) {
  let left = seconds;
  const tick = () => {
    if (!button.isConnected) clearInterval(countdown);
    else if (left <= 0) {
      clearInterval(countdown);
      button.click();
    } else button.textContent = `Trying again in ${left} s`;
    left -= 1;
  };
  tick();
  countdown = setInterval(tick, 1000);
}
