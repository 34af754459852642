"""`PromptSelector`: how requests name the chunks of a prompt, by its tokens or by the keys of its chunks."""

from __future__ import annotations

from collections.abc import Iterable

from lmkv.v1.prompt_pb2 import KeyPrompt, PromptSelector, TokenPrompt


def by_tokens(
    token_ids: Iterable[int], *, model_name: str = "", cache_salt: str = "", lora_name: str = ""
) -> PromptSelector:
    """Raises `ValueError` or `TypeError` if a token is not an int32."""
    tokens = TokenPrompt(token_ids=token_ids, model_name=model_name, cache_salt=cache_salt, lora_name=lora_name)
    return PromptSelector(tokens=tokens)


def by_keys(chunk_keys: Iterable[bytes], *, fingerprint: bytes = b"") -> PromptSelector:
    """Raises `TypeError` if a key is not `bytes`."""
    return PromptSelector(keys=KeyPrompt(chunk_keys=chunk_keys, fingerprint=fingerprint))


def names_chunks(prompt: PromptSelector) -> bool:
    """Whether it names any chunk."""
    return bool(prompt.tokens.token_ids or prompt.keys.chunk_keys)
