"""The coordinator: layout map, registry of instances, operations, web page.

Packages from top to bottom: `http` > `services` > `operations` > `core`, and `layout_store`, which shares the map
between coordinators. Start with `coordinator.Coordinator`.
"""
