"""Chunk keys: chained digests of tokens under a root. Pure; used by connector and coordinator.

    root  = HMAC-SHA-256(cluster secret, "lmkv.sha256-16" ‖ fingerprint ‖ cache salt ‖ LoRA)[:16]
    key_i = SHA-256(key_{i-1} ‖ tokens of chunk i ‖ extras of chunk i)[:16]          key_{-1} = root
    key   = SHA-256("lmkv.page" ‖ root ‖ digest)[:16]       of a page that its engine names by a chained digest

Tokens are raw little-endian u32; every string is preceded by its length as u32; the extras of a chunk, if any, are
preceded by 0xFFFFFFFF, which is not a token id. Keys do not depend on the process or its hash seed.

The pages of SGLang have digests that lmkv can compute, too (`sha256-pages`); the root is then without the cache salt:

    digest_i = SHA-256(digest_{i-1} ‖ tokens of page i ‖ extras of page i)      digest_{-1}: of the cache salt, if any

The chunks of what encoders make of images, sounds and videos (`sha256-media`) have the keys of pages, whose digests are
of the media; no tokens name them.

`tests/lmkv/golden_keys.json` has test vectors for other languages.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadChunkKey, BadTokens
from lmkv.packing import pack_fields

HASH_SCHEME = "sha256-16"
PAGE_HASH_SCHEME = "sha256-pages"
MEDIA_HASH_SCHEME = "sha256-media"
HASH_SCHEMES = (HASH_SCHEME, PAGE_HASH_SCHEME, MEDIA_HASH_SCHEME)
KEY_BYTES = 16
FOREIGN_DIGEST_BYTES = 32
"""Length of the digest by which an engine names a page."""
PREFIX_DIGEST_BYTES = 8
"""Length of the digest of one prefix of a chunk.

Digests are compared for every token from the first on, each with all tokens before it: chunks that differ in a token
count as alike with a probability of 2^-64, and an attacker has only this token to choose, as all before it are
equal.
"""
MAX_KEYS = 65_536
"""Maximum number of keys in one request: 1 MiB, the size limit of a message."""

ChunkKey = NewType("ChunkKey", bytes)
"""16 bytes that identify a chunk's tokens and all tokens before them."""

Tokens = NDArray[np.uint32]

_FOREIGN = b"lmkv.page"
_EXTRAS_MARK = b"\xff\xff\xff\xff"
_EMPTY = sha256()
_NO_EXTRAS: Mapping[int, bytes] = {}


def as_tokens(tokens: Sequence[int] | NDArray[np.integer], vocab_size: int = 0) -> Tokens:
    """Token ids as a contiguous little-endian u32 array of shape `[n]`.

    Raises `BadTokens` if an id is negative, not below `vocab_size` (0: unknown), or does not fit.
    """
    try:
        array = np.asarray(tokens)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{array.dtype} is not an integer type")
    except (OverflowError, ValueError, TypeError) as error:
        raise BadTokens(f"tokens must be integers from 0 to 2^32-2: {error}") from None
    if array.ndim != 1:
        raise BadTokens("tokens must be one flat list")
    limit = vocab_size or 0xFFFF_FFFF
    if array.dtype == np.dtype("<i4") and array.flags.c_contiguous and limit <= 1 << 31:
        unsigned = array.view("<u4")  # of negative ids: numbers from 2^31 on
        if int(unsigned.max(initial=0)) < limit:
            return unsigned
    if array.dtype.kind == "i" and (least := int(array.min(initial=0))) < 0:
        raise BadTokens(f"token id {least} is negative", token=least)
    top = int(array.max(initial=0))
    if array.size and top >= limit:
        raise BadTokens(f"token id {top} is beyond the vocabulary of {limit}", token=top, vocab_size=limit)
    return np.ascontiguousarray(array, dtype="<u4")


def root_key(fingerprint: bytes, *, cache_salt: str = "", lora: str = "", secret: bytes = b"") -> ChunkKey:
    """The root of the key chains of one spec, tenant and LoRA adapter. `lora` is an identity, `name@digest`.

    Without the cluster secret a client cannot compute keys, and so cannot probe for prompts of others.
    """
    namespace = pack_fields([fingerprint, cache_salt.encode(), lora.encode()])
    return ChunkKey(hmac.digest(secret, b"lmkv." + HASH_SCHEME.encode() + namespace, "sha256")[:KEY_BYTES])


def foreign_key(root: ChunkKey, digest: bytes) -> ChunkKey:
    """The key of a page that its engine names by the digest, 32 bytes, of its tokens and all tokens before them.

    The root adds what such digests lack: model, element type, layout and tenant.
    """
    return ChunkKey(sha256(_FOREIGN + root + digest).digest()[:KEY_BYTES])


def part_key(chunk_key: ChunkKey, part: int) -> ChunkKey:
    """The key of one part of a chunk: SHA-256(chunk key ‖ part as one byte)[:16]; part 0 has the chunk's key."""
    return ChunkKey(sha256(chunk_key + bytes((part,))).digest()[:KEY_BYTES]) if part else chunk_key


class KeyChain:
    """The keys of one growing prompt.

    `extras` maps a chunk's index to inputs of its KV other than tokens, such as multimodal hashes.
    """

    __slots__ = ("_extras", "chunk_size", "keys", "root")

    def __init__(self, root: ChunkKey, chunk_size: int, extras: Mapping[int, bytes] = _NO_EXTRAS) -> None:
        self.root = root
        self.chunk_size = chunk_size
        self.keys: list[ChunkKey] = []
        """Keys of the full chunks."""
        self._extras = extras

    def extend(self, tokens: Tokens) -> None:
        """Computes the missing keys of the full chunks of `tokens`, which begin with the prompt's first token."""
        start, stop = len(self.keys), tokens.size // self.chunk_size
        if stop <= start:
            return
        view = tokens.data.cast("B")
        stride = 4 * self.chunk_size
        parent = self.keys[-1] if self.keys else self.root
        for index in range(start, stop):
            parent = self._key(parent, view[index * stride : (index + 1) * stride], index)
            self.keys.append(parent)

    def partial(self, tokens: Tokens) -> ChunkKey | None:
        """Key of the tokens after the last full chunk; None if there are none. `extend` must be called first."""
        full = tokens.size // self.chunk_size
        if tokens.size == full * self.chunk_size:
            return None
        return self.behind(full, tokens[full * self.chunk_size :])

    def behind(self, index: int, tokens: Tokens) -> ChunkKey:
        """Key of a chunk that has these tokens and is behind the first `index` full chunks, whose keys are known."""
        parent = self.keys[index - 1] if index else self.root
        return self._key(parent, tokens.data.cast("B"), index)

    def prefixes(self, index: int, tokens: Tokens) -> bytes:
        """`prefix_digests` of a chunk that begins with these tokens behind the first `index` full chunks."""
        parent = self.keys[index - 1] if index else self.root
        return prefix_digests(parent, tokens, self._extras.get(index, b""))

    @property
    def namespace(self) -> ChunkKey:
        """Identifies the spec, tenant and adapter of a prompt: only prompts that share all of them have it."""
        return self.root

    def beginning(self) -> KeyChain:
        """The chain of another prompt in the same namespace, without keys and extras."""
        return KeyChain(self.root, self.chunk_size)

    def _key(self, parent: ChunkKey, tokens: memoryview, index: int) -> ChunkKey:
        digest = _EMPTY.copy()  # a third cheaper than sha256()
        digest.update(parent)
        digest.update(tokens)
        if extras := self._extras.get(index):
            digest.update(_EXTRAS_MARK + extras)
        return ChunkKey(digest.digest()[:KEY_BYTES])


def chunk_keys(
    tokens: Tokens, root: ChunkKey, chunk_size: int, *, partial: bool = False, extras: Mapping[int, bytes] = _NO_EXTRAS
) -> list[ChunkKey]:
    """Keys of a prompt's full chunks and, with `partial`, of the tokens after them."""
    chain = KeyChain(root, chunk_size, extras)
    chain.extend(tokens)
    last = chain.partial(tokens) if partial else None
    return chain.keys if last is None else [*chain.keys, last]


def partial_keys(
    parent: ChunkKey, tokens: Tokens, lengths: Iterable[int], extras: bytes = b""
) -> list[tuple[int, ChunkKey]]:
    """Lengths and keys of partial chunks behind `parent` with the first 1 to `tokens.size` of the tokens.

    `lengths` must ascend. Each token is hashed once.
    """
    view = tokens.data.cast("B")
    digest, hashed = _EMPTY.copy(), 0
    digest.update(parent)
    found = []
    for length in lengths:
        digest.update(view[4 * hashed : 4 * length])
        hashed = length
        copy = digest.copy()
        if extras:
            copy.update(_EXTRAS_MARK + extras)
        found.append((length, ChunkKey(copy.digest()[:KEY_BYTES])))
    return found


def prefix_digests(parent: ChunkKey, tokens: Tokens, extras: bytes = b"") -> bytes:
    """The digests of all prefixes of a chunk behind `parent`, shortest first: the first 8 bytes of each one's key."""
    view = tokens.data.cast("B")
    digest = sha256(parent)
    mark = _EXTRAS_MARK + extras if extras else b""
    found = []
    for at in range(0, len(view), 4):
        digest.update(view[at : at + 4])
        last = digest
        if mark:
            last = digest.copy()
            last.update(mark)
        found.append(last.digest()[:PREFIX_DIGEST_BYTES])
    return b"".join(found)


def check_prefix_digests(digests: bytes, token_count: int, field: str = "prefix_digests") -> bytes:
    """The field, unchanged. Raises `BadChunkKey` if it has not 8 bytes for each of at most `token_count` tokens."""
    if len(digests) % PREFIX_DIGEST_BYTES or len(digests) > token_count * PREFIX_DIGEST_BYTES:
        raise BadChunkKey(
            f"{field} has {len(digests)} bytes; it must be {PREFIX_DIGEST_BYTES} bytes for each of at most "
            f"{token_count} tokens",
            field=field,
            size_bytes=len(digests),
        )
    return digests


def page_seed(cache_salt: str) -> bytes:
    """The bytes before a prompt's first page in its digest: 32 that depend on the salt; empty without one.

    As SGLang 0.5.23 computes it for a request with this `cache_salt` and without an `extra_key`.
    """
    if not cache_salt:
        return b""
    salt = cache_salt.encode()
    return sha256(b"sglang-cache-namespace-v1\x00\x01" + len(salt).to_bytes(8, "little") + salt).digest()


def page_keys(tokens: Tokens, root: ChunkKey, page_size: int, prior: bytes = b"") -> tuple[bytes, bytes]:
    """Keys of a prompt's full pages, 16 bytes each, and the digest of the last of them.

    `prior` is the digest of the page before: `page_seed` at the beginning of a prompt.
    """
    view, stride = tokens.data.cast("B"), 4 * page_size
    keys = []
    for start in range(0, tokens.size // page_size * stride, stride):
        prior = sha256(prior + view[start : start + stride]).digest()
        keys.append(foreign_key(root, prior))
    return b"".join(keys), prior


class PageKeyChain(KeyChain):
    """The keys of one growing prompt whose chunks are named as pages (`sha256-pages`); only full ones have keys.

    Of a chunk without extras they are those of `page_keys`. Extras follow the tokens in its digest, as in `KeyChain`.
    """

    __slots__ = ("_prior", "_seed")

    def __init__(
        self, root: ChunkKey, chunk_size: int, extras: Mapping[int, bytes] = _NO_EXTRAS, *, seed: bytes = b""
    ) -> None:
        """`root` is without the cache salt, which `seed` is of (`page_seed`)."""
        super().__init__(root, chunk_size, extras)
        self._seed = self._prior = seed

    def partial(self, tokens: Tokens) -> ChunkKey | None:  # noqa: ARG002
        """None: pages are full."""
        return None

    def behind(self, index: int, tokens: Tokens) -> ChunkKey:
        """Raises `BadTokens`: pages are full, and keys of full ones are in `keys`."""
        raise BadTokens(f"page {index} with {tokens.size} of {self.chunk_size} tokens has no key")

    def prefixes(self, index: int, tokens: Tokens) -> bytes:  # noqa: ARG002
        """None: prompts do not end inside pages."""
        return b""

    @property
    def namespace(self) -> ChunkKey:
        """Identifies the spec, tenant and adapter of a prompt; the root alone does not name the tenant."""
        return foreign_key(self.root, self._seed) if self._seed else self.root

    def beginning(self) -> KeyChain:
        """The chain of another prompt in the same namespace, without keys and extras."""
        return PageKeyChain(self.root, self.chunk_size, seed=self._seed)

    def _key(self, parent: ChunkKey, tokens: memoryview, index: int) -> ChunkKey:  # noqa: ARG002
        extras = self._extras.get(index)
        self._prior = sha256(self._prior + tokens + (_EXTRAS_MARK + extras if extras else b"")).digest()
        return foreign_key(self.root, self._prior)


def join_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as one field of a message, 16 bytes each."""
    return b"".join(keys)


def check_keys(packed: bytes, field: str = "chunk_keys", limit: int = MAX_KEYS) -> bytes:
    """The field, unchanged. Raises `BadChunkKey` if its length is not a multiple of 16 or exceeds the limit."""
    if len(packed) % KEY_BYTES:
        raise BadChunkKey(
            f"{field} has {len(packed)} bytes; it must be whole keys of {KEY_BYTES} bytes each",
            field=field,
            size_bytes=len(packed),
        )
    if len(packed) > limit * KEY_BYTES:
        raise BadChunkKey(
            f"{field} has {len(packed) // KEY_BYTES} keys; at most {limit} are allowed", field=field, limit=limit
        )
    return packed


def split_keys(packed: bytes, field: str = "chunk_keys", limit: int = MAX_KEYS) -> list[ChunkKey]:
    """The keys in one field of a message. Raises as `check_keys`."""
    check_keys(packed, field, limit)
    return [ChunkKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]


def listed_keys(keys: Sequence[bytes], field: str = "chunk_keys", limit: int = MAX_KEYS) -> list[ChunkKey]:
    """The keys in a repeated field. Raises `BadChunkKey` if one has another length, or there are more than `limit`."""
    if len(keys) > limit:
        raise BadChunkKey(f"{field} has {len(keys)} keys; at most {limit} are allowed", field=field, limit=limit)
    for key in keys:
        if len(key) != KEY_BYTES:
            raise BadChunkKey(
                f"{field} has a key of {len(key)} bytes; each must have {KEY_BYTES}", field=field, size_bytes=len(key)
            )
    return [ChunkKey(key) for key in keys]


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """A digest of a set of keys; the fields are those of `lmkv.v1.TierDigest`."""

    chunk_count: int = 0
    key_sum: int = 0

    def plus(self, other: Digest) -> Digest:
        """The digest of the union of two disjoint sets."""
        return Digest(
            chunk_count=self.chunk_count + other.chunk_count, key_sum=(self.key_sum + other.key_sum) % (1 << 64)
        )


EMPTY_DIGEST = Digest()


def digest(keys: Collection[ChunkKey]) -> Digest:
    """The digest of distinct keys."""
    if not keys:
        return EMPTY_DIGEST
    heads = np.frombuffer(b"".join(keys), dtype="<u8")[::2]
    return Digest(chunk_count=len(keys), key_sum=int(heads.sum(dtype=np.uint64)))
