"""The set of engines, which changes while the proxy serves: by a file, by DNS, and by operators.

Imports `routing` and below. Start with `endpoints.Endpoints`.
"""
