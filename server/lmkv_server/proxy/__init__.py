"""The proxy: OpenAI's HTTP API in front of engines, with KV-aware routing and disaggregated prefill (P/D).

Imports nothing of the coordinator. Start with `proxy.Proxy`; `routing` chooses engines, `pd` drives prefill and decode,
`upstream` talks to engines.
"""
