// The panel of filters: values to click with their counts, and conditions on fields, in the syntax
// of `genius search --where`.

import { ask } from "./api.js";
import { count, IconButton, useRequest } from "./elements.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { chosen, current, currentEdition, dateFields } from "./state.js";

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
const UNCOUNTED_FIELDS = ["name", "title", "latitude", "longitude"];
const MAX_COUNTED_FIELDS = 18; // of the 20 that the service counts in one search
const FEW_VALUES = 8;
const MAX_VALUES = 100; // that the service counts

export function FiltersPanel({ state, search }) {
  const isAnySet = state.where.length > 0 || state.match;
  const timer = useRef(0);
  const match = useRef(null);
  useEffect(() => {
    if (document.activeElement !== match.current) match.current.value = state.match;
  }, [state.match]);
  const applyMatch = () => {
    clearTimeout(timer.current);
    const words = match.current?.value.trim() ?? current().match;
    if (words !== current().match)
      search({ match: words }, { replace: Boolean(words) === Boolean(current().match) });
  };
  const typed = () => {
    clearTimeout(timer.current);
    timer.current = setTimeout(applyMatch, TYPING_MS);
  };
  return html`
    <${Values} state=${state} search=${search} />
    <${Conditions} state=${state} search=${search} />
    <div class="row">
      <label for="match">Words in the text</label>
      <input
        id="match"
        ref=${match}
        type="text"
        maxlength="500"
        placeholder='words, "a phrase", begin*, -without'
        onInput=${typed}
        onChange=${applyMatch}
      />
      ${isAnySet &&
      html`<button type="button" onClick=${() => search({ where: [], match: "" })}>
        Remove all filters
      </button>`}
    </div>
    ${chosen().fields.length === 0 &&
    html`<p class="fine">The items of this index have no fields.</p>`}
  `;
}

/** Fields with their most frequent values. A click on a value narrows the hits to it. */
function Values({ state, search }) {
  const fields = chosen()
    .fields.filter((name) => !UNCOUNTED_FIELDS.includes(name))
    .slice(0, MAX_COUNTED_FIELDS);
  const name = JSON.stringify([
    chosen().name,
    state.where,
    state.match,
    state.modality,
    currentEdition(),
  ]);
  const { value } = useRequest(fields.length ? name : null, (signal) =>
    countValues(state, fields, signal),
  );
  const isWorthShowing = ({ field, values }) =>
    chosenValues(state.where, field).length > 0 ||
    (values.length > 1 && values.length < MAX_VALUES && values[0].items > 1);
  const { where } = state;
  return (value ?? [])
    .filter(isWorthShowing)
    .map((facet) => html`<${Facet} key=${facet.field} ...${facet} ...${{ where, search }} />`);
}

/**
 * Count the values of fields. The values of a field are counted without the condition on it, so
 * that a further one can be chosen: one search for each field with a condition, and one for the
 * others.
 */
async function countValues(state, fields, signal) {
  const facetOf = (field) => (dateFields().includes(field) ? `${field}:year` : field);
  const common = { k: 1, fields: [], match: state.match || undefined };
  if (state.modality) common.modality = state.modality;
  const narrowed = fields.filter((field) => chosenValues(state.where, field).length);
  const others = fields.filter((field) => !narrowed.includes(field));
  const searches = narrowed.map((field) => ({
    ...common,
    where: state.where.filter((condition) => valuesOf(condition, field) === null),
    facets: [facetOf(field)],
  }));
  if (others.length)
    searches.push({ ...common, where: state.where, facets: others.map(facetOf) });
  const json = { index: chosen().name, searches };
  const { results } = await ask("v1/search", { method: "POST", json, signal });
  const facets = Object.assign({}, ...results.map((result) => result.facets));
  return fields.map((field) => ({ field, values: facets[facetOf(field)] }));
}

function Facet({ field, values, where, search }) {
  const [isLong, setLong] = useState(false);
  const selected = chosenValues(where, field);
  const toggle = (value) => {
    const others = where.filter((condition) => valuesOf(condition, field) === null);
    const changed = selected.includes(value)
      ? selected.filter((other) => other !== value)
      : [...selected, value];
    const how = changed.length > 1 ? "in" : "=";
    const condition = spell({ field, how, value: changed.join(", ") }, changed);
    search({ where: condition ? [...others, condition] : others });
  };
  const shown = values.map(({ value, items }) => [String(value), items]);
  const missing = selected.filter((value) => !shown.some(([other]) => other === value));
  const all = [...shown, ...missing.map((value) => [value, 0])];
  const visible = all.filter(
    ([value], rank) => isLong || rank < FEW_VALUES || selected.includes(value),
  );
  return html`
    <div class="values" role="group" aria-label=${field}>
      <h3>${bare(field).split(".").at(-1)}</h3>
      ${visible.map(
        ([value, number]) => html`
          <button
            type="button"
            key=${value}
            aria-pressed=${selected.includes(value) ? "true" : "false"}
            onClick=${() => toggle(value)}
          >
            ${value} <small>${count(number)}</small>
          </button>
        `,
      )}
      ${all.length > visible.length &&
      html`<button type="button" class="quiet" onClick=${() => setLong(true)}>
        ${count(all.length - visible.length)} more
      </button>`}
    </div>
  `;
}

/** Rows for the conditions. A row without a value is not applied yet. */
function Conditions({ state, search }) {
  const [rows, setRows] = useState([]);
  const timer = useRef(0);
  const list = useRef(null);
  const applied = rows.map((row) => spell(row)).filter(Boolean);
  useEffect(() => {
    if (state.where.join("\n") === applied.join("\n") && rows.length) return;
    setRows(state.where.length ? state.where.map(parse) : [{ field: "", how: "=", value: "" }]);
  }, [state.where]);
  const apply = (changed) => {
    clearTimeout(timer.current);
    const where = changed.map((row) => spell(row)).filter(Boolean);
    if (where.join("\n") !== current().where.join("\n"))
      search({ where }, { replace: where.length === current().where.length });
  };
  const change = (number, changes, isTyped) => {
    const changed = rows.map((row, place) => (place === number ? { ...row, ...changes } : row));
    setRows(changed);
    clearTimeout(timer.current);
    if (isTyped) timer.current = setTimeout(() => apply(changed), TYPING_MS);
    else apply(changed);
  };
  const remove = (number) => {
    const changed = rows.filter((_, place) => place !== number);
    setRows(changed);
    apply(changed);
    document.getElementById("add-condition").focus();
  };
  const add = () => {
    setRows([...rows, { field: "", how: "=", value: "" }]);
    setTimeout(() => list.current.querySelector("li:last-child select").focus());
  };
  return html`
    <ul class="conditions" ref=${list} aria-label="Conditions, all of which must hold">
      ${rows.map(
        (row, number) => html`
          <${ConditionRow}
            key=${number}
            row=${row}
            onChange=${(changes, isTyped) => change(number, changes, isTyped)}
            onRemove=${() => remove(number)}
          />
        `,
      )}
    </ul>
    <div class="row">
      <button type="button" id="add-condition" onClick=${add}>Add condition</button>
    </div>
  `;
}

function ConditionRow({ row, onChange, onRemove }) {
  const fields = [...chosen().fields, ...BUILT_IN_FIELDS];
  if (row.field && !fields.includes(row.field)) fields.push(row.field);
  return html`
    <li class=${row.value.trim() ? "condition" : "condition unfinished"}>
      <select
        aria-label="Field"
        class="field"
        value=${row.field || fields[0]}
        onChange=${({ target }) => onChange({ field: target.value }, false)}
      >
        ${fields.map((name) => html`<option key=${name} value=${name}>${bare(name)}</option>`)}
      </select>
      <select
        aria-label="Comparison"
        class="how"
        value=${row.how}
        onChange=${({ target }) => onChange({ how: target.value }, false)}
      >
        ${OPERATORS.map(
          ([sign, words]) => html`<option key=${sign} value=${sign}>${words}</option>`,
        )}
      </select>
      <input
        type="text"
        aria-label="Value"
        class="value"
        value=${row.value}
        placeholder="value"
        maxlength="400"
        onInput=${({ target }) => onChange({ value: target.value }, true)}
        onChange=${({ target }) => onChange({ value: target.value }, false)}
      />
      <${IconButton} name="close" label="Remove this condition" onClick=${onRemove} />
    </li>
  `;
}

/** Parse a condition into a field, an operator, and a value without quotes. */
function parse(condition) {
  const [, field = "", how = "=", raw = ""] = CONDITION.exec(condition) ?? [];
  const values = how === "in" ? raw.match(/"[^"]*"|'[^']*'|[^,]+/g) ?? [] : [raw];
  return { field, how, value: values.map(unquoted).join(", ") };
}

/** Return a condition as text, or null if its value is empty. `in` takes several values. */
function spell({ field, how, value }, values = value.split(",")) {
  const name = field || chosen().fields[0] || BUILT_IN_FIELDS[0];
  if (!value.trim()) return null;
  if (how !== "in") return `${name}${how}${quoted(value.trim())}`;
  return `${name} in ${values.map((text) => text.trim()).filter(Boolean).map(quoted).join(",")}`;
}

/** Return the values that a condition demands of a field; null for any other condition. */
function valuesOf(condition, field) {
  const [, name, how, raw] = CONDITION.exec(condition) ?? [];
  if (name !== field || !(how === "=" || how === "in")) return null;
  return how === "=" ? [unquoted(raw)] : raw.match(/"[^"]*"|'[^']*'|[^,]+/g).map(unquoted);
}

const chosenValues = (where, field) =>
  where.flatMap((condition) => valuesOf(condition, field) ?? []);

/** Return the name of a field without quotes. */
const bare = (name) => name.replaceAll(/["']/g, "");

const unquoted = (text) => text.trim().replace(/^(["'])([^]*)\1$/, "$2");

/** Quote a value that contains spaces or signs, as conditions require. */
const quoted = (text) =>
  /^[^\s"',=<>~!]+$/.test(text)
    ? text
    : text.includes('"')
      ? `'${text.replaceAll("'", "’")}'`
      : `"${text}"`;
