"""The node: one process per host that keeps KV cache in shared memory and on secondary tiers.

Packages from top to bottom; each imports only packages below it (`pyproject.toml`, `tool.importlinter`):
`metrics` > `engines`, `serving` > `fleet` > `stack`, `commands` > `handoff` > `fetch` > `tiers`, `peers`, `sessions` >
`cache`. Start with `node.Node`, which composes them.
"""
