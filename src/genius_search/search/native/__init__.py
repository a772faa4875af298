"""The compiled search: its source, and the module that compiles it."""
