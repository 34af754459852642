"""The UCX channel, a plug-in: tagged messages through ucxx.

Start with `channel.UcxChannel`; `wire` defines the bytes.
"""
