"""The verbs: each reads folders and writes one folder."""
