"""Whose work a card must name: the papers, and the authors of weights that were imported."""

from __future__ import annotations

from typing import Final, NamedTuple

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
