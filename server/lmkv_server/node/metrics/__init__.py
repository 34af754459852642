"""The node's Prometheus metrics and the HTTP server that exposes them.

Reads the statistics of every other package and is imported only by `node.node`. Start with `collector.Metrics`.
"""
