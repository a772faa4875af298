"""C code: its source, the module that compiles it and the one that opens it."""
