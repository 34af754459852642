"""The coordinator: layout map, registry of instances, operations, web page.

Packages from top to bottom: `http` > `services` > `operations` > `registry` > `layout_store` > `core`; a package
imports only those below it. Start with `coordinator.Coordinator`.
"""
