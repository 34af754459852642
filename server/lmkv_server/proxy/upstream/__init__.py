"""HTTP to engines: requests, answers, server-sent events, token counts, failover.

Start with `client.Upstream`.
"""
