"""What the HTTP servers of coordinator, proxy and node share. Pure: no web framework, no sockets."""
