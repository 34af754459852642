"""HTTP client of engines and parser of server-sent events. Imports only `engine`. Start with `client.EngineClient`."""
