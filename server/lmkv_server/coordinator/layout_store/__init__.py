"""A layout map that several coordinators share through Valkey or Redis.

Each coordinator publishes the chunks of the instances that report to it, and follows what the others publish.
May import `core`. Start with `layout_store.LayoutStore` (the contract), then `shared_map.SharedMap`.
"""
