"""gRPC services of the coordinator. Handlers translate messages and call `registry` and `operations`.

May import `operations` and what is below. Start with `services.Services`, which composes them for one tenant.
"""
