"""Indexes in shards: built by functions over folders, on one machine or many, and searched as one index."""
