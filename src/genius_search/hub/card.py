"""README.md of what is published: its use, its origin, its numbers. Markdown under a head of YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from genius_search.errors import UsageError

LIBRARY: Final = "genius-search"
MEASURES: Final = ("R@1", "R@5", "R@10", "R@50", "MRR")

_CITATIONS: Final = """\
```bibtex
{% raw %}@inproceedings{kim2025genius,
  title     = {{GENIUS}: A Generative Framework for Universal Multimodal Search},
  author    = {Kim, Sungyeon and Zhu, Xinliang and Lin, Xiaofan and Bastan, Muhammet and Gray, Douglas and
               Kwak, Suha},
  booktitle = {Proceedings of the Computer Vision and Pattern Recognition Conference (CVPR)},
  pages     = {19659--19669},
  year      = {2025}
}
{% endraw %}
{% if uniir %}
{% raw %}
@inproceedings{wei2024uniir,
  title     = {{UniIR}: Training and Benchmarking Universal Multimodal Information Retrievers},
  author    = {Wei, Cong and Chen, Yang and Chen, Haonan and Hu, Hexiang and Zhang, Ge and Fu, Jie and
               Ritter, Alan and Chen, Wenhu},
  booktitle = {European Conference on Computer Vision (ECCV)},
  year      = {2024}
}
{% endraw %}
{% endif %}
```
"""

_MACROS: Final = """\
{% macro facts(rows) -%}
| | |
|---|---|
{% for name, value in rows.items() %}
| {{ name }} | {{ value | cell }} |
{% endfor %}
{%- endmacro %}
{% macro licence() -%}
{{ "The publisher did not say." if license == "unknown" else "`%s`." % license }}
{%- endmacro %}
---
{% for name, value in head.items() %}
{{ name }}: {{ value | json }}
{% endfor %}
---

# {{ name }}

"""

_MODEL: Final = (
    _MACROS
    + """\
A GENIUS model: generative multimodal search. Given a text, an image or both, and an instruction, it \
generates the ID of what matches.

{{ facts(summary) }}
## Use

```console
$ pip install 'genius-search[hf]'
```

```python
from genius_search import Genius, Index

model = Genius.from_pretrained("{{ name }}")
index, _ = Index.create("photos.index", model=model, pool="photos/")
for hit in index.search("a red leather bag"{{ ', modality="image"' if finds_images }}, k=5):
    print(hit.id, hit.score)
```

{% if imported or uniir %}
## Origin of the weights

{% if imported %}
Imported, and not trained by the publisher: the {{ imported | join(" and ") }}, from published checkpoints \
of GENIUS (Kim et al., CVPR 2025).
{% endif %}
{% if uniir %}
The encoder was imported from UniIR's {{ uniir }} (Wei et al., ECCV 2024).
{% endif %}
The terms of their authors apply; please cite them.

{% endif %}
## Training data

{% if datasets %}
Trained on {{ datasets | join(", ") }}.
{% elif imported %}
See the paper of the authors of the imported weights.
{% else %}
The publisher did not name the data set.
{% endif %}

{% if training %}
{{ facts(training) }}
{% endif %}
Settings of the quantizer and the generator are in `config.json`.

## Numbers

{% if results and results.rows %}
Measured on {{ results.data | cell or "a data set without a name" }}\
{{ ", split %s" % (results.split | cell) if results.split }}\
{% for setting in ("beam", "scores", "instructions") if setting in results.config %}\
{{ "; " if loop.first else ", " }}{{ setting }} {{ results.config[setting] | cell }}{% endfor %}.

{% set queries, rows = results.config.get("max_queries"), results.config.get("rows") %}
{% if queries or rows %}
**Only a part of the evaluation: {{ "at most %s queries of each row" % queries if queries }}\
{{ "; " if queries and rows }}{{ "only the rows %s" % (rows | join(", ")) if rows }}.**

{% endif %}
R@k as M-BEIR defines it: the share of queries with any right answer among the first k.

| {{ columns | join(" | ") }} |
|{{ "---|" * (columns | length) }}
{% for row in results.rows %}
| {% for name in columns %}{{ row.get(name, "") | cell }}{{ " | " if not loop.last }}{% endfor %} |
{% endfor %}
{% else %}
No evaluation came with this model.
{% endif %}

## Health of its IDs

{% if health %}
{{ facts(health) -}}
{% else %}
Not measured.
{% endif %}

## Licence

{{ licence() }}

## Citation

"""
    + _CITATIONS
)

_INDEX: Final = (
    _MACROS
    + """\
A search index of GENIUS: the IDs of a pool's items, tied to the model that made them.

{{ facts(summary) }}
## Use

```console
$ pip install 'genius-search[hf]'
{% if model %}
$ genius pull {{ model }} --out {{ model_folder }}
{% endif %}
$ genius pull datasets/{{ name }} --out pulled.index
$ genius search pulled.index "a red leather bag" --model {{ model_folder }}
```

## Licence

{{ licence() }}

## Citation

"""
    + _CITATIONS
)


class ResultRow(BaseModel, extra="allow"):
    """One data set's numbers."""

    method: str


class EvaluationSettings(BaseModel, extra="allow"):
    """Conditions of a measurement."""

    rows: list[str] = []


class Results(BaseModel):
    """The ``results.json`` of an evaluation."""

    rows: list[ResultRow]
    config: EvaluationSettings = EvaluationSettings()
    model: str | None = None
    """Fingerprint of the model that was measured."""
    data: str = ""
    split: str = ""


def read_results(path: Path) -> Results:
    """Read the ``results.json`` that ``genius evaluate`` wrote.

    Raises
    ------
    UsageError
        the file cannot be read or has another form.
    """
    try:
        return Results.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise UsageError(
            f"{path} is not what `genius evaluate` writes ({reason}); give the results.json of its folder"
        ) from None


def model_card(
    name: str,
    config: Mapping[str, Any],
    *,
    license: str = "unknown",  # noqa: A002  the hub's word
    datasets: tuple[str, ...] = (),
    training: Mapping[str, str] | None = None,
    health: Mapping[str, Any] | None = None,
    results: Results | None = None,
    imported: tuple[str, ...] = (),
    uniir: str | None = None,
) -> str:
    """Return the README.md of a model.

    Parameters
    ----------
    config
        the contents of its ``config.json``.
    datasets
        names of the training data; those on the hub have the form owner/name.
    training
        fingerprints and sizes of the training data.
    health
        of the IDs after training, as the quantizer's manifest holds it.
    results
        of an evaluation of this very model.
    imported
        parts that were imported from published checkpoints.
    uniir
        which of UniIR's models the encoder is, such as ``clip-sf``.
    """
    encoder = str(config["encoder"]["spec"])
    kind, _, place = encoder.partition(":")
    is_inside = place.startswith("./")
    head = {
        "license": license,
        "library_name": LIBRARY,
        "pipeline_tag": "feature-extraction",
        "tags": ["genius", "generative-retrieval", "multimodal-search", "semantic-ids"],
        "datasets": [dataset for dataset in datasets if dataset.count("/") == 1],
        "base_model": place if kind == "clip" and not is_inside else [],
    }
    rows = [] if results is None else [row.model_dump() for row in results.rows]
    return _render(
        _MODEL,
        head={name: value for name, value in head.items() if value != []},
        name=name,
        license=license,
        datasets=datasets,
        training=training,
        imported=imported,
        uniir=uniir,
        summary={
            "encoder": f"{encoder}, inside" if is_inside else encoder,
            "width of features": config["dim"],
            "ID": f"{config['levels']} codes ({' × '.join(str(size) for size in config['sizes'])})",
            "fingerprint": config["fingerprint"],
        },
        finds_images="image" in (health or {}).get("level0_modality", ()),
        results=None if results is None else {**results.model_dump(), "rows": rows},
        columns=[
            *("dataset", "task", "pool", "method", "queries"),
            *(measure for measure in MEASURES if any(measure in row for row in rows)),
        ],
        health=None if not health else _health(health),
    )


def index_card(
    name: str,
    *,
    model: str | None,
    model_fingerprint: str,
    by_modality: Mapping[str, int],
    contents: tuple[str, ...],
    license: str = "unknown",  # noqa: A002  as above
) -> str:
    """Return the README.md of an index.

    Parameters
    ----------
    model
        the name of its model on the hub, if it is there.
    by_modality
        number of items of each modality.
    contents
        what the index holds besides codes and ids.
    """
    head = {
        "license": license,
        "tags": ["genius", "generative-retrieval", "search-index"],
        "viewer": False,
    }
    return _render(
        _INDEX,
        head=head,
        name=name,
        license=license,
        model=model,
        model_folder="FOLDER" if model is None else model.rpartition("/")[2],
        uniir=None,
        summary={
            **{f"items: {modality}": count for modality, count in by_modality.items()},
            "model": model or "not named; known by its fingerprint",
            "model fingerprint": model_fingerprint,
            "holds": "; ".join(("codes and item ids", *contents)),
        },
    )


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment  # noqa: PLC0415  only cards need it

    environment = Environment(  # noqa: S701  Markdown, no HTML
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["cell"] = _format_cell
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(values)


def _format_cell(value: Any) -> str:
    """Return a value as a table's cell can hold it."""
    match value:
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.3f}"
        case _:
            return " ".join(str(value).split()).replace("|", "\\|")


def _health(health: Mapping[str, Any]) -> dict[str, Any]:
    purity = health.get("purity")
    return {
        "candidates": health["candidates"],
        "distinct IDs": health["distinct_ids"],
        "candidates that share an ID": f"{health['collision_rate']:.2%}",
        "purity of the modality level": "no such level" if purity is None else f"{purity:.2%}",
        "mean cosine of an embedding to its ID": f"{health['reconstruction']:.3f}",
        "verdict": "; ".join(health["problems"]) or "healthy",
    }
