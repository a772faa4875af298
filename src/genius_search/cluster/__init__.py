"""Clusters: indexes in shards, built by many processes and searched as one index."""
