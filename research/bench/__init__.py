"""Benchmarks of speed and quality, in comparison with other packages."""
