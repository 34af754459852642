"""The engine's connection to its node: finds or starts the process, and holds the `Attach` stream.

Start with `client.NodeClient`.
"""
