"""Synthetic data sets in M-BEIR's layout."""
