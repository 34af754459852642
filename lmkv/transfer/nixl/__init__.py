"""The NIXL channel: reads peers' memory by NIXL agents (RDMA, NVLink, TCP through UCX).

The only importer of NIXL. Start with `channel.NixlChannel`.
"""
