"""Data structures of the coordinator: the layout map, instances, their models, and admission of joining instances.

Synchronous, without IO and protos; time is passed in. Imports nothing else of the coordinator. Start with
`layout_map.LayoutMap`.
"""
