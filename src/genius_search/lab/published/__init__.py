"""The authors' published files: read safely, checked name by name, imported as ours."""
