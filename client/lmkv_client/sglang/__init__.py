"""SGLang with lmkv: `LmkvStorage`, a storage backend of HiCache, and `LmkvLinker`, an external linker without HiCache.

SGLang imports them by the names in its options (docs/guides/sglang.md). `page_store` has what both do: keys, lookups,
copies and commits. `host_pool` describes the pages of SGLang's host memory, `kv_spec` what decides whether two engines
share them, and `sglang_api` and `linker_api` have all that is imported from SGLang.
Start with `page_store.PageStore`.
"""

from lmkv_client.sglang.linker import LmkvLinker
from lmkv_client.sglang.storage import LmkvStorage

__all__ = ["LmkvLinker", "LmkvStorage"]
