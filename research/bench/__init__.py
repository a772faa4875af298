"""Benchmarks of speed and quality, beside the usual ways to search."""
