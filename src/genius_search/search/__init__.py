"""Constrained search: the ID table, the beam, ranking, the index."""
