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
        "model.md",
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
        "index.md",
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
    from jinja2 import Environment, PackageLoader  # noqa: PLC0415  only cards need it

    environment = Environment(  # noqa: S701  Markdown, no HTML
        loader=PackageLoader("genius_search.hub"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _format_cell
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.get_template(template).render(values)


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
