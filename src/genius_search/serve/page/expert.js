// The panel for experts: beam, re-ranking, number of hits, and the instruction.

import { html, useState } from "./preact.js";
import { chosen } from "./state.js";

const BEAMS = [10, 20, 50, 100, 200, 500, 1000];
const COUNTS = [10, 20, 50, 100];
const RERANKS = { none: "None", codes: "By codes", embeddings: "By embeddings" };

export function ExpertPanel({ state, search }) {
  const counts = [...new Set([...COUNTS, state.k])].sort((first, second) => first - second);
  const change = (name) => (event) => search({ [name]: event.target.value.trim() });
  return html`
    <div class="row dials">
      <${Beam} state=${state} search=${search} />
      <${Rerank} state=${state} onChange=${change("rerank")} />
      <div>
        <label for="k">Hits</label>
        <select
          id="k"
          value=${state.k}
          onChange=${({ target }) => search({ k: Number(target.value) })}
        >
          ${counts.map((number) => html`<option key=${number} value=${number}>${number}</option>`)}
        </select>
      </div>
    </div>
    <div class="row">
      <label for="instruction">Instruction</label>
      <input
        id="instruction"
        type="text"
        maxlength="1000"
        list="instructions"
        value=${state.instruction}
        placeholder="Description of the results (optional)"
        onChange=${change("instruction")}
      />
      <datalist id="instructions">
        ${chosen().instructions.map((text) => html`<option key=${text} value=${text} />`)}
      </datalist>
    </div>
    <p class="fine">
      A wider beam finds more and takes longer. It is never narrower than the number of hits.
    </p>
  `;
}

function Beam({ state, search }) {
  const applied = state.beam ? BEAMS.findIndex((beam) => beam >= state.beam) + 1 : 0;
  const [moved, setMoved] = useState(null); // while the slider is held
  const position = moved ?? applied;
  const width = position === 0 ? chosen().settings.beam : BEAMS[position - 1];
  const used = width < state.k ? `${width} (${state.k} for ${state.k} hits)` : `${width}`;
  const words = position === 0 ? `default, ${used}` : used;
  const apply = ({ target }) => {
    setMoved(null);
    search({ beam: Number(target.value) === 0 ? null : BEAMS[Number(target.value) - 1] });
  };
  return html`
    <div>
      <label for="beam">Beam width: number of paths to follow</label>
      <div class="slider">
        <input
          id="beam"
          type="range"
          min="0"
          max=${BEAMS.length}
          value=${position}
          aria-valuetext=${words}
          onInput=${({ target }) => setMoved(Number(target.value))}
          onChange=${apply}
        />
        <output for="beam">${words}</output>
      </div>
    </div>
  `;
}

function Rerank({ state, onChange }) {
  const standard = RERANKS[chosen().settings.rerank].toLowerCase();
  return html`
    <div>
      <label for="rerank">Re-ranking</label>
      <select id="rerank" value=${state.rerank} onChange=${onChange}>
        <option value="">Default (${standard})</option>
        ${Object.entries(RERANKS).map(
          ([value, name]) => html`
            <option
              key=${value}
              value=${value}
              disabled=${value === "embeddings" && !chosen().stores_embeddings}
            >
              ${name}
            </option>
          `,
        )}
      </select>
    </div>
  `;
}
