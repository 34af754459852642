"""The endpoint picker: Envoy's `ext_proc` service for the Gateway API inference extension, by the proxy's routing.

`exchange` is the protocol of one HTTP request; `selection` picks its engine. Start with
`picker`.
"""
