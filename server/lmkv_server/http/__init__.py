"""The parts that HTTP servers of coordinator, proxy and node share. May import `lmkv` only, and nothing of its users.

Start with `server.HttpServer`. `protocol` limits connections, `guard` rejects cross-site requests, `static` has the
files that the pages of coordinator and proxy share.
"""
