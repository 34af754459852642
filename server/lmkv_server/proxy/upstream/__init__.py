"""HTTP client of engines, and server-sent events. Imports `engine` and `openai`. Start with `client.UpstreamClient`."""
