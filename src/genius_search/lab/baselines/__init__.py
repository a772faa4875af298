"""Rivals beside the model in every table: other IDs, dense indexes, nearest code vectors, ``generate``."""
