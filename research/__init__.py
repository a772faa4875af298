"""Evaluation, baselines, ablations and reproductions; run from a clone as ``python -m research.NAME``."""

import os

# Threads of NumPy's BLAS wait busily, which costs more than they save beside PyTorch's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
