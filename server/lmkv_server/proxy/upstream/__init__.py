"""HTTP client of engines, server-sent events, and what `/tokenize` must be asked. Imports `engine` and `openai`. Start
with `client.UpstreamClient`.
"""
