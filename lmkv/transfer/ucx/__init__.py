"""The UCX channel: tagged messages through ucxx. Loaded only if the configuration names it.

Start with `channel.UcxChannel`; `wire` defines the bytes.
"""
