"""Clusters: indexes in shards, built by many processes, each shard an ordinary index, searched as one."""
