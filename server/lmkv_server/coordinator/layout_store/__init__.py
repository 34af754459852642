"""A layout map that coordinators share through Valkey or Redis.

Start with `layout_store.LayoutStore` (the contract), then `shared_map.SharedMap`.
"""
