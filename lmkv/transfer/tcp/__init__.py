"""The TCP channel: plain sockets, no library. A server sends only extents of live grants.

Start with `channel.TcpChannel`; `server` defines the bytes.
"""
