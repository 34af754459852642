"""Hints of requests (docs/guides/hints.md): read from the request, sent to the node, reported in the response."""
