"""Encoders turn images and texts into features; `genius_search.encoders.base` holds their protocol."""
