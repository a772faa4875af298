"""What the authors published: files, read safely and imported as ours; results, and how to reproduce them."""
