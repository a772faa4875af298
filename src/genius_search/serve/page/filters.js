// The panel of filters: one row for each condition on a field, in the syntax of `genius search
// --where`.

import { byId, h, icon } from "./elements.js";
import { chosen, current } from "./state.js";

const BUILT_IN_FIELDS = ["text", "id"];
const OPERATORS = [
  ["=", "is"],
  ["!=", "is not"],
  ["~", "contains"],
  ["!~", "does not contain"],
  ["in", "is one of"],
  ["<", "below"],
  ["<=", "at most"],
  [">=", "at least"],
  [">", "above"],
];
// field, operator and value of a condition; names and values with spaces are quoted
const CONDITION =
  /^\s*((?:"[^"]*"|'[^']*'|[^\s.=!<>~"',]+)(?:\.(?:"[^"]*"|'[^']*'|[^\s.=!<>~"',]+))*)\s*(!=|!~|<=|>=|=|<|>|~|in(?=[\s"']))\s*([^]*)$/;
const TYPING_MS = 250;
let typing = 0;

/** Draw the panel, unless the user is editing a condition that has not been applied yet. */
export function filtersPanel(panel, state, search) {
  if (
    panel.contains(document.activeElement) &&
    document.activeElement.matches("input, select") &&
    readConditions(panel).join("\n") === state.where.join("\n")
  )
    return;
  const apply = () => {
    for (const row of panel.querySelectorAll(".condition"))
      row.classList.toggle("unfinished", !row.querySelector(".value").value.trim());
    const where = readConditions(panel);
    const match = panel.querySelector("#match").value.trim();
    const now = current();
    if (where.join("\n") === now.where.join("\n") && match === now.match) return;
    search(
      { where, match },
      { replace: where.length === now.where.length && Boolean(match) === Boolean(now.match) },
    );
  };
  const typed = () => (clearTimeout(typing), (typing = setTimeout(apply, TYPING_MS)));
  const rows = h(
    "ul",
    { class: "conditions", "aria-label": "Conditions, all of which must hold" },
    (state.where.length ? state.where : [null]).map((condition) =>
      conditionRow(condition, apply, typed),
    ),
  );
  const match = h("input", {
    id: "match",
    type: "text",
    maxlength: 500,
    value: state.match,
    placeholder: 'words, "a phrase", begin*, -without',
    onchange: apply,
    oninput: typed,
  });
  const add = () => {
    const row = conditionRow(null, apply, typed);
    rows.append(row);
    row.querySelector("select").focus();
  };
  panel.replaceChildren(
    rows,
    h(
      "div",
      { class: "row" },
      h(
        "button",
        { type: "button", id: "add-condition", onclick: add },
        icon("plus"),
        "Add condition",
      ),
      state.where.length > 1 || (state.where.length && state.match)
        ? h(
            "button",
            { type: "button", onclick: () => search({ where: [], match: "" }) },
            "Remove all",
          )
        : "",
    ),
    h("div", { class: "row" }, h("label", { for: "match" }, "Words in the text"), match),
    chosen().fields.length
      ? ""
      : h("p", { class: "fine" }, "The items of this index have no fields."),
  );
}

function conditionRow(condition, apply, typed) {
  const [, name = "", operator = "", raw = ""] = CONDITION.exec(condition ?? "") ?? [];
  const fields = [...chosen().fields, ...BUILT_IN_FIELDS];
  if (name && !fields.includes(name)) fields.push(name);
  const field = h(
    "select",
    { "aria-label": "Field", class: "field" },
    fields.map((name) => h("option", { value: name }, name.replaceAll(/["']/g, ""))),
  );
  field.value = name || fields[0];
  const how = h(
    "select",
    { "aria-label": "Comparison", class: "how" },
    OPERATORS.map(([sign, words]) => h("option", { value: sign }, words)),
  );
  how.value = operator || "=";
  const value = h("input", {
    type: "text",
    "aria-label": "Value",
    class: "value",
    value: unquoted(raw, operator),
    placeholder: "value",
    maxlength: 400,
    onchange: apply,
    oninput: typed,
  });
  field.addEventListener("change", apply);
  how.addEventListener("change", apply);
  const row = h("li", { class: "condition" }, field, how, value);
  const remove = () => {
    row.remove();
    apply();
    byId("add-condition")?.focus();
  };
  row.append(
    h(
      "button",
      { type: "button", class: "icon", "aria-label": "Remove this condition", onclick: remove },
      icon("close"),
    ),
  );
  return row;
}

/** Return the complete conditions of the panel as texts. */
function readConditions(panel) {
  return [...panel.querySelectorAll(".condition")]
    .map((row) =>
      spell(
        row.querySelector(".field").value,
        row.querySelector(".how").value,
        row.querySelector(".value").value.trim(),
      ),
    )
    .filter(Boolean);
}

function spell(name, how, typed) {
  if (!typed) return null;
  if (how === "in")
    return `${name} in ${typed
      .split(",")
      .map((value) => value.trim())
      .filter(Boolean)
      .map(quoted)
      .join(",")}`;
  return `${name}${how}${quoted(typed)}`;
}

/** Quote a value that contains spaces or signs, as conditions require. */
const quoted = (text) =>
  /^[^\s"',=<>~!]+$/.test(text)
    ? text
    : text.includes('"')
      ? `'${text.replaceAll("'", "’")}'`
      : `"${text}"`;

function unquoted(raw, operator) {
  const bare = (text) => text.trim().replace(/^(["'])([^]*)\1$/, "$2");
  if (operator !== "in") return bare(raw);
  return (raw.match(/"[^"]*"|'[^']*'|[^,]+/g) ?? []).map(bare).join(", ");
}
