"""The vLLM connector. `scheduler` runs in vLLM's scheduler, `worker` in its workers, `node` talks to the lmkv node.

Start with `vllm_connector.LMKVConnector`.
"""
