"""SGLang's HiCache storage backend: `LmkvStorage` keeps the pages of its host pool in a node of lmkv.

SGLang imports it by `--hicache-storage-backend dynamic` with `module_path` `lmkv_client.sglang`. `host_pool` describes
SGLang's pages, `kv_spec` what decides whether two engines share them, and `sglang_api` has all that is imported from
SGLang.
Start with `storage.LmkvStorage`.
"""

from lmkv_client.sglang.storage import LmkvStorage

__all__ = ["LmkvStorage"]
