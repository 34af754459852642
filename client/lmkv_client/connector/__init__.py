"""The vLLM connector. `scheduler` runs in vLLM's scheduler, `worker` in its workers. Built on `lmkv_client.engine`.

Start with `vllm_connector.LMKVConnector`.
"""
