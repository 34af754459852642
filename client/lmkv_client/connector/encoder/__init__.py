"""The connector of vLLM's encoder cache: what encoders make of images, sounds and videos, kept in the node like KV.

Start with `ec_connector.LMKVECConnector`. Both sides are engines of `lmkv_client.engine`: the scheduler side looks up
and loads, the worker side stores.
"""
