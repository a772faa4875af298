"""The HTTP service: an index, or several, behind an API and a page."""
