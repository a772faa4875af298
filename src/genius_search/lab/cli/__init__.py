"""Commands of the laboratory, found through the entry point ``genius_search.commands``."""

from __future__ import annotations

from typing import Final

COMMANDS: Final[dict[str, dict[str, str]]] = {
    "Evaluate and compare": {
        "demo": "genius_search.lab.cli.demo:Demo",
        "evaluate": "genius_search.lab.cli.evaluate:Evaluate",
        "doctor": "genius_search.lab.cli.evaluate:Doctor",
        "score": "genius_search.lab.cli.score:Score",
        "sweep": "genius_search.lab.cli.sweep:Sweep",
        "report": "genius_search.lab.cli.report:Report",
        "baseline fit": "genius_search.lab.cli.baseline:Fit",
        "baseline evaluate": "genius_search.lab.cli.baseline:Evaluate",
        "baseline dense": "genius_search.lab.cli.baseline:Dense",
        "bench speed": "genius_search.lab.cli.bench:Speed",
        "bench quality": "genius_search.lab.cli.bench:Quality",
        "bench search": "genius_search.lab.cli.bench:Search",
    },
    "Published checkpoints": {
        "repro": "genius_search.lab.cli.repro:Repro",
        "import genius": "genius_search.lab.cli.imports:ImportGenius",
        "import clip-sf": "genius_search.lab.cli.imports:ImportClipSf",
        "import clip-ff": "genius_search.lab.cli.imports:ImportClipFf",
        "import blip-sf": "genius_search.lab.cli.imports:ImportBlipSf",
        "import blip-ff": "genius_search.lab.cli.imports:ImportBlipFf",
    },
    "Data": {
        "data karpathy": "genius_search.lab.cli.data:Karpathy",
        "data catalogue": "genius_search.lab.cli.data:Catalogue",
        "data rehearsal": "genius_search.lab.cli.data:Rehearsal",
    },
}
"""Commands by group: name -> module and class, in the order of the help."""
