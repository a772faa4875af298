"""The cards of what is published: what it is, how to use it, what it was made from, how well it is.

Markdown under a head of YAML, as the hub expects; every value in the head is written as JSON, which is YAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from filelock import FileLock, Timeout

from genius_search.errors import UsageError
from genius_search.records import Modality

__all__ = ["GENIUS_PAPER", "Origin", "citations", "credit"]

GENIUS_PAPER: Final = """@inproceedings{kim2025genius,
  title     = {{GENIUS}: A Generative Framework for Universal Multimodal Search},
  author    = {Kim, Sungyeon and Zhu, Xinliang and Lin, Xiaofan and Bastan, Muhammet and Gray, Douglas and
               Kwak, Suha},
  booktitle = {Proceedings of the Computer Vision and Pattern Recognition Conference (CVPR)},
  pages     = {19659--19669},
  year      = {2025}
}"""
UNIIR_PAPER: Final = """@inproceedings{wei2024uniir,
  title     = {{UniIR}: Training and Benchmarking Universal Multimodal Information Retrievers},
  author    = {Wei, Cong and Chen, Yang and Chen, Haonan and Hu, Hexiang and Zhang, Ge and Fu, Jie and
               Ritter, Alan and Chen, Wenhu},
  booktitle = {European Conference on Computer Vision (ECCV)},
  year      = {2024}
}"""


class Origin(NamedTuple):
    """Which parts of a model are others' weights, as the manifests say."""

    parts: tuple[str, ...] = ()
    """Those imported from checkpoints in the form that the authors of GENIUS published."""
    uniir: str | None = None
    """Which of UniIR's models the encoder is, such as ``clip-sf``; None when it is none of them."""


def credit(origin: Origin) -> str | None:
    """What a card says of weights that whoever publishes it did not train; None when there are none."""
    said = []
    if origin.parts:
        what = " and ".join(origin.parts)
        said.append(
            f"Imported, and not trained by whoever published this: the {what}, from published checkpoints of "
            "GENIUS (Kim et al., CVPR 2025)."
        )
    if origin.uniir is not None:
        said.append(f"The encoder is UniIR's {origin.uniir} (Wei et al., ECCV 2024), imported likewise.")
    if not said:
        return None
    return " ".join([*said, "The terms of their authors apply; please cite them."])


def citations(origin: Origin | None = None) -> str:
    """The papers to cite, as BibTeX."""
    papers = [GENIUS_PAPER, *([UNIIR_PAPER] if origin is not None and origin.uniir is not None else [])]
    return "\n".join(["```bibtex", "\n\n".join(papers), "```"])


__all__ = ["alone", "new_folder"]


def new_folder(place: Path) -> Path:
    """The full name of a folder that is to be made, or made anew.

    Raises
    ------
    UsageError
        one is in it now, so it cannot be put there under its name; or a file has this name.
    """
    folder = place.expanduser().resolve()
    if Path.cwd().is_relative_to(folder):
        raise UsageError(f"{place} is the folder that you are in; give the name of a new one")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{place} is a file; give the name of a new folder")
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Fill a folder while nobody else does.

    Raises
    ------
    UsageError
        another process is at it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        raise UsageError(
            f"{folder} is being written by another process; wait for it, or choose another place"
        ) from None


__all__ = ["LIBRARY", "IndexCard", "ModelCard", "Numbers", "index_card", "model_card"]

LIBRARY: Final = "genius-retrieval"
_MEASURES: Final = ("R@1", "R@5", "R@10", "R@50", "MRR")
INSTALL: Final = "$ pip install 'genius-retrieval[hf]'"


class Numbers(NamedTuple):
    """What `genius evaluate` wrote."""

    data: str
    """Name of the data set."""
    split: str
    config: Mapping[str, Any]
    """How it was measured."""
    rows: Sequence[Mapping[str, Any]]

    @staticmethod
    def read(body: Mapping[str, Any]) -> Numbers:
        """Out of a ``results.json``; raises KeyError, TypeError or ValueError where it is none."""
        rows, config = body["rows"], body.get("config", {})
        if not (isinstance(rows, list) and isinstance(config, dict)):
            raise TypeError("rows and config are of another form")
        if not isinstance(config.get("rows", []), list):
            raise TypeError("config.rows is not a list")
        _ = [row["method"] for row in rows]
        return Numbers(str(body.get("data", "")), str(body.get("split", "")), config, rows)


class ModelCard(NamedTuple):
    """What a model's card is written from."""

    name: str
    """Of the repository, or of the folder."""
    license: str
    """The hub's short name of it, such as ``mit``."""
    datasets: tuple[str, ...]
    """Names of what it was trained on; those of the hub have the form owner/name."""
    config: Mapping[str, Any]
    """The model's ``config.json``."""
    training: Mapping[str, str]
    """Fingerprints and numbers of the training data, by what they are."""
    health: Mapping[str, Any] | None
    """Of the IDs after training."""
    numbers: Numbers | None
    """What an evaluation of this very model measured."""
    origin: Origin = Origin()
    """Which of its weights are others'."""


class IndexCard(NamedTuple):
    """What an index's card is written from."""

    name: str
    license: str
    model: str | None
    """Where its model is on the hub."""
    model_fingerprint: str
    by_modality: Mapping[str, int]
    has_texts: bool
    has_images: bool
    """Whether paths of pictures are in it; the pictures never are."""
    has_embeddings: bool
    has_fields: bool = False
    """Whether other fields are, which came with the items."""


def model_card(card: ModelCard) -> str:
    """README.md of a model."""
    config = card.config
    encoder = str(config["encoder"]["spec"])
    head: dict[str, Any] = {
        "license": card.license,
        "library_name": LIBRARY,
        "pipeline_tag": "feature-extraction",
        "tags": ["genius", "generative-retrieval", "multimodal-search", "semantic-ids"],
        "datasets": [name for name in card.datasets if name.count("/") == 1],
    }
    if encoder.startswith("clip:") and not encoder.startswith("clip:./"):
        head["base_model"] = encoder.removeprefix("clip:")
    credits_ = credit(card.origin)
    sizes = " × ".join(str(size) for size in config["sizes"])
    return _page(
        head,
        f"# {card.name}",
        "A GENIUS model: generative multimodal search. Given a text, an image or both, and an instruction, "
        "it generates the ID of what matches.",
        _table(
            {
                "encoder": encoder
                if not encoder.partition(":")[2].startswith("./")
                else f"{encoder}, inside",
                "width of features": config["dim"],
                "ID": f"{config['levels']} codes ({sizes})",
                "fingerprint": config["fingerprint"],
            }
        ),
        "## Use",
        f"```console\n{INSTALL}\n```",
        "```python\n"
        "from genius_search import Genius, Index\n\n"
        f'model = Genius.from_pretrained("{card.name}")\n'
        'index, _ = Index.create("photos.index", model=model, pool="photos/")\n'
        f'for hit in index.search("a red leather bag"{_modality(card.health)}, k=5):\n'
        "    print(hit.id, hit.score)\n"
        "```",
        *([] if credits_ is None else ["## Origin of the weights", credits_]),
        "## Training data",
        _trained_on(card),
        *([_table(card.training)] if card.training else []),
        "Settings of the quantizer and the generator are in `config.json`.",
        "## Numbers",
        _numbers(card.numbers)
        if card.numbers and card.numbers.rows
        else "No evaluation came with this model.",
        "## Health of its IDs",
        _health(card.health) if card.health else "Not measured.",
        "## Licence",
        _licence(card.license),
        "## Citation",
        citations(card.origin),
    )


def index_card(card: IndexCard) -> str:
    """README.md of an index."""
    inside = [
        "codes and item ids",
        *(["texts of the items"] if card.has_texts else []),
        *(["paths of the items' pictures, not the pictures"] if card.has_images else []),
        *(["their other fields, as JSON"] if card.has_fields else []),
        *(["an embedding of each item"] if card.has_embeddings else []),
    ]
    head = {
        "license": card.license,
        "tags": ["genius", "generative-retrieval", "search-index"],
        "viewer": False,
    }
    return _page(
        head,
        f"# {card.name}",
        "A search index of GENIUS: the IDs of a pool's items, tied to the model that made them.",
        _table(
            {
                **{f"items: {label}": count for label, count in card.by_modality.items()},
                "model": card.model or "not said; it is known by its fingerprint",
                "model fingerprint": card.model_fingerprint,
                "holds": "; ".join(inside),
            }
        ),
        "## Use",
        "```console\n"
        f"{INSTALL}\n"
        f"{_pull_model(card.model)}"
        f"$ genius pull datasets/{card.name} --out pulled.index\n"
        f'$ genius search pulled.index "a red leather bag" --model {_model_place(card.model)}\n'
        "```",
        "## Licence",
        _licence(card.license),
        "## Citation",
        citations(),
    )


def _page(head: Mapping[str, Any], *parts: str) -> str:
    lines = [
        f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items() if value != []
    ]
    return "\n".join(["---", *lines, "---", "", "\n\n".join(parts), ""])


def _table(facts: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(fact)} |" for name, fact in facts.items())])


def _cell(value: Any) -> str:
    """A value as a table's cell can hold it."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _numbers(numbers: Numbers) -> str:
    rows = numbers.rows
    measures = [name for name in _MEASURES if any(name in row for row in rows)]
    columns = ["dataset", "task", "pool", "method", "queries", *measures]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [
            f"{row[name]:.3f}" if isinstance(row.get(name), float) else _cell(row.get(name, ""))
            for name in columns
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n\n".join(
        [
            _measured(numbers),
            *_only_a_part(numbers.config),
            "R@k is M-BEIR's: the share of queries with any right answer among the first k.",
            "\n".join(lines),
        ]
    )


def _measured(numbers: Numbers) -> str:
    """On what, and how."""
    config = numbers.config
    on = f"Measured on {_cell(numbers.data) or 'a data set without a name'}"
    split = f", split {_cell(numbers.split)}" if numbers.split else ""
    how = [f"{name} {_cell(config[name])}" for name in ("beam", "scores", "instructions") if name in config]
    return f"{on}{split}" + (f"; {', '.join(how)}." if how else ".")


def _only_a_part(config: Mapping[str, Any]) -> list[str]:
    """Says that these are not a whole data set's numbers, where they are not."""
    limits = []
    if config.get("max_queries"):
        limits.append(f"at most {_cell(config['max_queries'])} queries of each row")
    if config.get("rows"):
        limits.append(f"only the rows {', '.join(_cell(row) for row in config['rows'])}")
    return [f"**A part of the evaluation: {'; '.join(limits)}.**"] if limits else []


def _health(health: Mapping[str, Any]) -> str:
    purity = health.get("purity")
    return _table(
        {
            "candidates": health["candidates"],
            "distinct IDs": health["distinct_ids"],
            "candidates that share an ID": f"{health['collision_rate']:.2%}",
            "purity of the modality level": "no such level" if purity is None else f"{purity:.2%}",
            "mean cosine of an embedding to its ID": f"{health['reconstruction']:.3f}",
            "verdict": "; ".join(health["problems"]) or "healthy",
        }
    )


def _licence(name: str) -> str:
    return "Whoever published this did not say." if name == "unknown" else f"`{name}`."


def _modality(health: Mapping[str, Any] | None) -> str:
    """The argument that asks for pictures, where a level-0 code is known to stand for them."""
    known = () if health is None else health.get("level0_modality", ())
    return f', modality="{Modality.IMAGE.value}"' if Modality.IMAGE.value in known else ""


def _trained_on(card: ModelCard) -> str:
    if card.datasets:
        return f"Trained on {', '.join(card.datasets)}."
    if card.origin.parts:
        return "What the authors of the imported weights say of it in their paper."
    return "Whoever published this model did not name its data set."


def _pull_model(model: str | None) -> str:
    """The command that brings an index's model to the folder which the next one names."""
    return "" if model is None else f"$ genius pull {model} --out {_model_place(model)}\n"


def _model_place(model: str | None) -> str:
    return "FOLDER" if model is None else model.rpartition("/")[2]
