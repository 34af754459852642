"""KV cache of prompts for Hugging Face transformers: loaded into a `DynamicCache`, stored after `generate`.

`LmkvCache` is for a decoder model in this process, on devices of any kind; docs/guides/transformers.md shows its use.
"""

from lmkv_client.transformers.cache import CacheStatistics, LmkvCache

__all__ = ["CacheStatistics", "LmkvCache"]
