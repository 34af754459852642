"""The proxy: OpenAI's HTTP API in front of engines, with KV-aware routing and disaggregated prefill (P/D).

Imports `lmkv_server.http` and `lmkv`, and nothing of the coordinator or the node. Start with `proxy.Proxy`. `admission`
bounds requests, `pd` serves them, `routing` selects engines, `upstream` is the HTTP client of engines.
"""
