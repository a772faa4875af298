"""Rivals that write IDs of other kinds."""
