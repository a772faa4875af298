"""The authors' checkpoints, opened safely and imported, and their published results."""
