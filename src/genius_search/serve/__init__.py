"""The HTTP service: one or more indexes with an API and a web page."""
