"""Evaluation, baselines, ablations and reproductions; run from a clone as ``python -m research.NAME``."""
