"""A synthetic data set in M-BEIR's layout."""
