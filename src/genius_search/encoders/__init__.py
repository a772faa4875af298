"""Encoders turn images and texts into features; ``base.py`` defines their protocol."""
