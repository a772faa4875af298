"""What the authors published: their files, read safely and checked name by name."""
