"""The laboratory: evaluation, baselines, benchmarks, reports, published checkpoints, synthetic data."""
