"""Rivals beside the model in every table: other IDs, dense indexes, ``generate``."""
