"""What the coordinator knows: instances, their specs, and which chunk is where.

No IO. Start with `layout_map.LayoutMap`, then `registry.Registry`.
"""
