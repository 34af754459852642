"""gRPC handlers of the coordinator. They translate messages and call `core` and `operations`.

Start with `services.Services`, which composes them for one tenant.
"""
