"""The server processes of lmkv, a package each: coordinator, node, proxy and webhook. They share `http` alone."""
