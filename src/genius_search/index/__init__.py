"""Indexes: pools of items, searched by their IDs."""
