"""The HTTP service: one or several indexes behind an API and a page."""
