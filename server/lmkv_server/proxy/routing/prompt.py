"""Reads what routing needs of a request's body, and computes its keys, also while its parts arrive. Pure.

Token ids become one array, without a Python object per id. How a body was split makes no difference: what it is by its
end is what `read_prompt` finds in the whole. Keys are those of each namespace that the prompt may be of: a spec or LoRA
adapter by the name under which engines serve it, as instances register it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadKvSpec
from lmkv.keys import KEY_BYTES, MAX_KEYS, ChunkKey, page_keys, page_seed, root_key
from lmkv.spec import KvSpec
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_kernels import chunk_keys, token_ids
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Json

PROMPT_NAME = b'"prompt"'
TOKENS_BEGIN = re.compile(rb'"prompt"\s*:\s*(?:\[\s*)?(?=\[\s*\d)')
"""Where the token ids of `"prompt": [1, 2]` and `"prompt": [[1, 2]]` begin."""
_MARK = secrets.token_hex(16)
"""What replaces token ids that are cut out. Bodies cannot have it: it shows where the list was."""
_LIFTED: tuple[Any, ...] = (_MARK, [_MARK])


class NotJson(ValueError):
    """The body is not a JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRequest:
    """The body of a request for tokens."""

    path: str
    body: Json
    """Without the token ids, if the prompt consists of them."""
    id_parts: Sequence[NDArray[np.uint32]] = ()
    """Parts of the prompt, if it was sent as token ids."""

    @property
    def tokens(self) -> NDArray[np.uint32] | None:
        """The prompt, if it was sent as token ids. Joins the parts."""
        if len(self.id_parts) == 1:
            return self.id_parts[0]
        return np.concatenate(self.id_parts) if self.id_parts else None

    @property
    def token_count(self) -> int:
        """Number of token ids."""
        return sum(part.size for part in self.id_parts)

    @property
    def model_name(self) -> str:
        """The model or LoRA adapter; empty if the body names none."""
        return _text(self.body.get("model"))

    @property
    def cache_salt(self) -> str:
        """The cache salt; empty if there is none."""
        return _text(self.body.get("cache_salt"))

    @property
    def user(self) -> str:
        """OpenAI's `user`; empty if the body names none."""
        return _text(self.body.get("user"))

    @property
    def has_text(self) -> bool:
        """Whether an engine can tokenize it: a chat, or one prompt."""
        if self.path in (CHAT, MESSAGES):
            return isinstance(self.body.get("messages"), list)
        if self.path == RESPONSES:
            return bool(self.body.get("input"))
        return self.path == COMPLETIONS and bool(self.text_prompt)

    @property
    def text_prompt(self) -> str:
        """The prompt of a completion, if it is one text; otherwise empty."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        return _text(prompt)


def read_prompt(path: str, body: bytes) -> PromptRequest:
    """Reads a request's body. Raises `NotJson`."""
    opening = TOKENS_BEGIN.match(body, begin) if (begin := body.find(PROMPT_NAME)) >= 0 else None
    end = body.find(b"]", opening.end()) if opening else -1
    if opening is not None and end >= 0:
        ids = memoryview(body)[opening.end() : end + 1]
        if found := lifted(path, body[: opening.end()], lambda: [token_ids(ids)], body[end + 1 :]):
            return found
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(str(error)) from None
    if not isinstance(content, dict):
        raise NotJson("it is not an object")
    return PromptRequest(path=path, body=content)


def lifted(
    path: str, head: bytes, id_parts: Callable[[], Sequence[NDArray[np.uint32]]], rest: bytes
) -> PromptRequest | None:
    """The request of a body without the list of token ids, which was between `head` and `rest`.

    None if that list was not the prompt, which only completions have, or has other values: the whole body must be
    decoded.
    """
    if path != COMPLETIONS:
        return None
    try:
        body = msgspec.json.decode(b'%b"%b"%b' % (head, _MARK.encode(), rest))
        if isinstance(body, dict) and body.get("prompt") in _LIFTED:
            return PromptRequest(path=path, body={**body, "prompt": []}, id_parts=id_parts())
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


MAX_HEAD_BYTES = 64 << 10
"""Token ids that begin later are read at the end, from the whole body."""
MIN_TEXT_BYTES = 8 << 10
"""Shorter parts are read together."""
MAX_GAP_BYTES = 8 << 10
"""Maximum size of white space that separates token ids; with more, the whole body is read at the end."""
_MAYBE_TOKENS = re.compile(rb'"prompt"\s*(?::\s*(?:\[\s*){0,2})?\Z')
"""What more text could make a beginning of token ids."""
_NO_TOKENS = np.empty(0, np.uint32)


class ArrivingPrompt:
    """The body of one request, of which more parts may arrive. Keeps the parts."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._is_plain = True
        """Whether what has arrived may be a body with token ids."""
        self._head = b""
        """The body up to the token ids."""
        self._is_in_list = False
        self._text = b""
        """Text of the list that has not been read."""
        self._ids: list[NDArray[np.uint32]] = []
        self._rest: list[bytes] | None = None
        """The body after the token ids, once these are complete."""
        self.has_returned_tokens = False
        """Whether `add` and `end` have returned the prompt; known after `read`."""

    @property
    def fields(self) -> Json:
        """The fields before the token ids; empty before these begin, or if they are not the prompt."""
        closing = b"0]}" if self._head.rstrip().endswith(b"[") else b"0}"
        try:
            found = msgspec.json.decode(self._head + closing)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return found if isinstance(found, dict) and "prompt" in found else {}

    def add(self, part: bytes, *, is_last: bool = False) -> NDArray[np.uint32]:
        """Takes a part of the body. Returns the next token ids, which may turn out not to be the prompt.

        `is_last` is a hint: that no more parts follow may also be known later.
        """
        if is_last and not self._parts:
            self._is_plain = False  # `read_prompt` reads it without a copy
        self._parts.append(part)
        if not self._is_plain:
            return _NO_TOKENS
        if self._rest is not None:
            self._rest.append(part)
            return _NO_TOKENS
        self._text += part
        if not self._is_in_list:
            self._look_for_list()
        return self._read() if self._is_in_list and len(self._text) >= MIN_TEXT_BYTES else _NO_TOKENS

    def end(self) -> NDArray[np.uint32]:
        """Must be called once all parts were taken. Returns the token ids that `add` has not returned."""
        return self._read() if self._is_in_list and self._rest is None else _NO_TOKENS

    def read(self, path: str) -> PromptRequest:
        """The request, after `end`. Raises `NotJson`."""
        if self._rest is not None and (found := lifted(path, self._head, lambda: self._ids, b"".join(self._rest))):
            self.has_returned_tokens = True
            return found
        return read_prompt(path, b"".join(self._parts))

    def _look_for_list(self) -> None:
        text = self._text
        begin = text.find(PROMPT_NAME)
        opening = TOKENS_BEGIN.match(text, begin) if begin >= 0 else None
        if opening is not None:
            self._is_in_list = True
            self._head, self._text = text[: opening.end()], text[opening.end() + 1 :]
        elif len(text) > MAX_HEAD_BYTES or (begin >= 0 and not _MAYBE_TOKENS.match(text, begin)):
            self._end_reading()

    def _read(self) -> NDArray[np.uint32]:
        """Reads the text up to the last comma, or to the end of the list."""
        text = self._text
        end = text.find(b"]")
        if end >= 0:
            self._rest = [text[end + 1 :]]
        else:
            end = text.rfind(b",")
            if end < 0:
                if len(text) > MAX_GAP_BYTES:
                    self._end_reading()
                return _NO_TOKENS
        self._text = text[end + 1 :] if self._rest is None else b""
        try:
            ids = token_ids(b"[" + text[:end] + b"]")
        except ValueError:
            ids = _NO_TOKENS
        if not ids.size:  # nothing between two commas, or between comma and end
            self._end_reading()
            return _NO_TOKENS
        self._ids.append(ids)
        return ids

    def _end_reading(self) -> None:
        """Leaves the rest to `read`."""
        self._is_plain = self._is_in_list = False
        self._text, self._ids, self._rest = b"", [], None


class GrowingKeys:
    """The keys of one prompt for one spec and adapter; of a longer prompt the first `MAX_KEYS`."""

    def __init__(self, spec: KvSpec, lora_identity: str, cache_salt: str, secret: bytes) -> None:
        self._spec = spec
        salt = "" if spec.has_page_hashes else cache_salt  # which a page's digest has
        self._root = root_key(spec.fingerprint, cache_salt=salt, lora=lora_identity, secret=secret)
        self._before: bytes = page_seed(cache_salt) if spec.has_page_hashes else self._root
        """What the next full chunk follows: a key, or the digest of a page."""
        self._keys = bytearray()
        self._rest: list[NDArray[np.uint32]] = []
        self._rest_count = 0

    def add(self, tokens: NDArray[np.uint32]) -> None:
        """Takes the next tokens. A copy of some of them remains until their chunk is full."""
        room = MAX_KEYS - len(self._keys) // KEY_BYTES
        if not room:
            return
        self._rest.append(tokens)
        self._rest_count += tokens.size
        size = self._spec.chunk_size
        if self._rest_count < size:
            return
        waiting = self._waiting()
        full = min(waiting.size // size, room) * size
        self._keys += self._hash(waiting[:full])
        self._rest = [waiting[full:].copy()]  # a view would keep all of them
        self._rest_count = waiting.size - full

    @property
    def has_prefix_matches(self) -> bool:
        """Whether an instance holds a number of leading chunks, one by one, whatever follows them."""
        return self._spec.matches_prefixes

    def full(self) -> bytes:
        """The keys of the full chunks so far, 16 bytes each."""
        return bytes(self._keys)

    def all(self) -> bytes:
        """The keys, 16 bytes each: of the full chunks, and of the tokens after them unless chunks have several parts or
        are pages."""
        keys = bytes(self._keys)
        is_partial = self._rest_count > 0 and len(keys) < MAX_KEYS * KEY_BYTES
        if not is_partial or self._spec.has_page_hashes or not self._spec.matches_prefixes:
            return keys
        return keys + chunk_keys(self._waiting(), self._before, self._spec.chunk_size)

    def _waiting(self) -> NDArray[np.uint32]:
        return self._rest[0] if len(self._rest) == 1 else np.concatenate(self._rest)

    def _hash(self, tokens: NDArray[np.uint32]) -> bytes:
        if self._spec.has_page_hashes:
            keys, self._before = page_keys(tokens, self._root, self._spec.chunk_size, self._before)
        else:
            keys = chunk_keys(tokens, self._before, self._spec.chunk_size)
            self._before = ChunkKey(keys[-KEY_BYTES:])
        return keys


MAX_NAMESPACES = 16
"""Specs and adapters of one name that a lookup covers, the last registered ones; as at the coordinator."""


@dataclass(frozen=True, slots=True)
class ServedNamespace:
    """The inputs of chunk keys besides tokens and cache salt."""

    spec: KvSpec
    lora_identity: str = ""

    def growing_keys(self, cache_salt: str, secret: bytes) -> GrowingKeys:
        """The keys of a prompt, of which there are no tokens yet."""
        return GrowingKeys(self.spec, self.lora_identity, cache_salt, secret)


class Namespaces:
    """The namespaces of a fleet."""

    def __init__(self, instances: Iterable[Instance] = ()) -> None:
        self._by_name: dict[str, dict[tuple[bytes, str], ServedNamespace]] = {}
        for instance in instances:
            self._add(instance)

    def of(self, model_name: str) -> list[ServedNamespace]:
        """The possible namespaces of a prompt. Without a name, those of the only spec; empty if there are several."""
        if model_name:
            return list(self._by_name.get(model_name, {}).values())[-MAX_NAMESPACES:]
        specs = {
            one.spec.fingerprint: one
            for kinds in self._by_name.values()
            for one in kinds.values()
            if not one.lora_identity
        }
        return list(specs.values()) if len(specs) == 1 else []

    def _add(self, instance: Instance) -> None:
        specs: dict[bytes, KvSpec] = {}
        for message in instance.specs:
            try:
                specs[message.fingerprint] = spec = KvSpec.from_proto(message)
            except BadKvSpec:  # of a newer version: its chunks are not found
                continue
            self._by_name.setdefault(spec.model_name, {})[spec.fingerprint, ""] = ServedNamespace(spec)
        for served in instance.served_models:
            if served.fingerprint in specs:
                kinds = self._by_name.setdefault(served.name, {})
                kinds[served.fingerprint, served.lora_identity] = ServedNamespace(
                    specs[served.fingerprint], served.lora_identity
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptKeys:
    """The keys of a prompt's chunks in one namespace, 16 bytes each."""

    keys: bytes
    fingerprint: bytes
    chunk_size: int


class GrowingChains:
    """The keys of the tokens that `add` has taken."""

    def __init__(self, namespaces: Sequence[ServedNamespace], cache_salt: str, secret: bytes) -> None:
        self._namespaces = namespaces
        self._cache_salt = cache_salt
        self._growing = [one.growing_keys(cache_salt, secret) for one in namespaces]
        self._token_count = 0

    @property
    def has_prefix_matches(self) -> bool:
        """Whether in each namespace, of one or more, an instance holds a number of leading chunks, whatever follows."""
        return bool(self._growing) and all(one.has_prefix_matches for one in self._growing)

    def add(self, tokens: NDArray[np.uint32]) -> None:
        """Takes the next tokens of the prompt."""
        self._token_count += tokens.size
        for one in self._growing:
            one.add(tokens)

    def is_of(self, namespaces: Sequence[ServedNamespace], cache_salt: str, token_count: int) -> bool:
        """Whether these are the keys of a prompt that is known by now: all its tokens, and no more, were taken."""
        found = (self._token_count, self._cache_salt, self._namespaces)
        return found == (token_count, cache_salt, namespaces)

    def full(self) -> list[PromptKeys]:
        """The keys of the full chunks so far in each namespace."""
        return self._named([one.full() for one in self._growing])

    def all(self) -> list[PromptKeys]:
        """The keys in each namespace."""
        return self._named([one.all() for one in self._growing])

    def _named(self, keys: Sequence[bytes]) -> list[PromptKeys]:
        return [
            PromptKeys(keys=of_one, fingerprint=one.spec.fingerprint, chunk_size=one.spec.chunk_size)
            for one, of_one in zip(self._namespaces, keys, strict=True)
        ]
