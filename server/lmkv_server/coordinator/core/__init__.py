"""Data structures of the coordinator: the layout map, instances, their models, and admission of joining instances.

Synchronous and without IO; time is passed in. Imports nothing else of the coordinator. Protobuf messages occur only as
values that are stored as they came (tier usage, statistics, pins). Start with `layout_map.LayoutMap`.
"""
