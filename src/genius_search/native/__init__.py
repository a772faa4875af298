"""C code: its source, and the module that compiles it."""
