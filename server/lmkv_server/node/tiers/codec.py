"""Encodes chunks for tiers that keep them outside of memory, before encryption and checksum (docs/guides/codecs.md).

    magic, version | code | element type | elements of a plane, of a group | bytes of the chunk, of its code | seal
    code, padded with zeros to whole words

The header has all that decoding needs. A chunk that cannot be encoded, or may not be, is stored with the code `RAW`.
Only this module imports the package `zstandard`, which is optional.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol
from zlib import crc32

from lmkv.config.node import LOSSY_CODECS
from lmkv.errors import ConfigError
from lmkv.spec import DTYPE_BYTES, LOSSY_DTYPES, NATIVE_TILES, KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv_kernels import codecs
from lmkv_kernels.codecs import CodecFormat
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.tiers.encryption_header import ChunkDescription
from lmkv_server.node.tiers.threads import ThreadBuffer

GROUP_TOKENS = 16
"""Tokens of a head's keys, or values, that share a scale."""
RAW = "raw"
ZSTD = "zstd"
_CODES = (RAW, *codecs.CODES, ZSTD)  # by their numbers in headers
_BYTES = "bytes"
_ELEMENTS = (_BYTES, *codecs.ELEMENTS)
_MAGIC, _VERSION = b"lmkvcod", 1
_FIELDS = struct.Struct("<7sBBBxxIIQQ")
_SEAL = struct.Struct("<I")
HEADER_BYTES = 64
"""The header with zeros behind it: codes begin at a line of the cache."""
assert _FIELDS.size + _SEAL.size <= HEADER_BYTES
WORD_BYTES = 8
ZSTD_LEVEL = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecHeader:
    """The header of one encoded chunk."""

    code: str
    element: str = _BYTES
    plane_elements: int = 0
    group_elements: int = 0
    size_bytes: int
    """Bytes of the chunk."""
    code_bytes: int

    def packed(self) -> bytes:
        """The header as it is stored."""
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            _CODES.index(self.code),
            _ELEMENTS.index(self.element),
            self.plane_elements,
            self.group_elements,
            self.size_bytes,
            self.code_bytes,
        )
        return (fields + _SEAL.pack(crc32(fields))).ljust(HEADER_BYTES, b"\0")


def parse_codec_header(data: bytes) -> CodecHeader | None:
    """The header; None if it is none, of another version, or contradicts itself."""
    if len(data) != HEADER_BYTES:
        return None
    fields = data[: _FIELDS.size]
    magic, version, code, element, plane, group, size_bytes, code_bytes = _FIELDS.unpack(fields)
    if (magic, version) != (_MAGIC, _VERSION) or _SEAL.unpack_from(data, _FIELDS.size) != (crc32(fields),):
        return None
    if code >= len(_CODES) or element >= len(_ELEMENTS):
        return None
    return CodecHeader(
        code=_CODES[code],
        element=_ELEMENTS[element],
        plane_elements=plane,
        group_elements=group,
        size_bytes=size_bytes,
        code_bytes=code_bytes,
    )


def most_encoded_bytes(size_bytes: int) -> int:
    """The most bytes that a chunk of `size_bytes` is stored in: those of `RAW`."""
    return HEADER_BYTES + _padded(size_bytes)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // WORD_BYTES) * WORD_BYTES


def lossy_format(spec: KvSpec, code: str, size_bytes: int, token_count: int) -> CodecFormat | None:
    """How a chunk of an engine that accepts rounded ones is encoded; None if it is to be stored as it is.

    Recurrent states are: an error in them would stay for all tokens that follow. So is a chunk whose size two parts
    have that differ in their planes.
    """
    if not spec.accepts_lossy:
        return None
    fitting = [part for part in spec.parts if part.size_bytes(token_count) == size_bytes]
    planes = {_plane(spec, part, token_count) for part in fitting if part.rule != PART_RULE_END}
    if len(planes) != 1 or any(part.rule == PART_RULE_END for part in fitting):
        return None
    element, tokens, head_size = planes.pop()
    return CodecFormat(
        element=element, code=code, plane_elements=tokens * head_size, group_elements=GROUP_TOKENS * head_size
    )


def _plane(spec: KvSpec, part: KvPart, token_count: int) -> tuple[str, int, int]:
    """Element type, tokens and head size of the keys, or values, of one head that a chunk has side by side."""
    in_tiles = spec.format == NATIVE_TILES and part.block_size
    return part.kv_dtype, part.block_size if in_tiles else part.kept_tokens(token_count), part.head_size


class KnownSpecs(Protocol):
    """The specs of a node's engines."""

    def spec(self, fingerprint: bytes) -> KvSpec | None:
        """The spec of this fingerprint, if it is known. Called on any thread."""


class ChunkCodec:
    """The codec of one tier's chunks. Thread-safe: threads have buffers of the largest chunk that each has encoded."""

    def __init__(self, name: str, specs: KnownSpecs) -> None:
        """`name` is as configured, and not none."""
        self.scope = f"{name}.{GROUP_TOKENS}" if name in LOSSY_CODECS else name
        """Separates names of these chunks from those of other codecs, or of other parameters."""
        self.is_lossy = name in LOSSY_CODECS
        """Whether it rounds."""
        self._name = name
        self._specs = specs
        self._encoded = ThreadBuffer()
        self._planes = ThreadBuffer()
        self._zstd = threading.local()

    def applies_to(self, spec: KvSpec) -> bool:
        """Whether chunks of this spec may be encoded: only engines that accept rounded ones get such."""
        return not self.is_lossy or spec.accepts_lossy

    def encode(self, chunk: ChunkDescription, memory: memoryview) -> tuple[memoryview, int]:
        """Encodes a chunk into this thread's buffer; returns whole pages, and how many of their bytes are used."""
        spec = self._specs.spec(chunk.fingerprint)
        buffer = self._encoded.get(align(most_encoded_bytes(chunk.size_bytes)))
        header = (
            (self._encode_zstd(spec, memory, buffer[HEADER_BYTES:]) if self._name == ZSTD else None)
            or (self._encode_lossy(spec, chunk, memory, buffer[HEADER_BYTES:]) if spec and self._name != ZSTD else None)
            or self._encode_raw(memory, buffer[HEADER_BYTES:])
        )
        end, encoded_bytes = HEADER_BYTES + header.code_bytes, HEADER_BYTES + _padded(header.code_bytes)
        buffer[:HEADER_BYTES] = header.packed()
        buffer[end : align(end)] = bytes(align(end) - end)
        return buffer[: align(end)], encoded_bytes

    def decode(self, fingerprint: bytes, encoded: memoryview, memory: memoryview) -> int | None:
        """Decodes a chunk, and returns its size in bytes; None if it is damaged, or of another codec.

        `memory` has room for the largest chunk; if this returns None, it may contain anything.
        """
        header = parse_codec_header(bytes(encoded[:HEADER_BYTES]))
        if (
            header is None
            or header.code not in (RAW, self._name)
            or not 0 < header.size_bytes <= len(memory)
            or len(encoded) != HEADER_BYTES + _padded(header.code_bytes)
        ):
            return None
        source, target = encoded[HEADER_BYTES : HEADER_BYTES + header.code_bytes], memory[: header.size_bytes]
        if header.code == RAW:
            is_decoded = self._decode_raw(source, target)
        elif header.code == ZSTD:
            is_decoded = self._decode_zstd(header, source, target)
        else:
            spec = self._specs.spec(fingerprint)
            is_decoded = spec is not None and spec.accepts_lossy and self._decode_lossy(header, source, target)
        return header.size_bytes if is_decoded else None

    def _encode_raw(self, memory: memoryview, target: memoryview) -> CodecHeader:
        target[: len(memory)] = memory
        return CodecHeader(code=RAW, size_bytes=len(memory), code_bytes=len(memory))

    def _decode_raw(self, source: memoryview, target: memoryview) -> bool:
        if len(source) != len(target):
            return False
        target[:] = source
        return True

    def _encode_lossy(
        self, spec: KvSpec, chunk: ChunkDescription, memory: memoryview, target: memoryview
    ) -> CodecHeader | None:
        form = lossy_format(spec, self._name, chunk.size_bytes, chunk.token_count)
        if form is None or (code_bytes := form.encoded_bytes(len(memory))) >= len(memory):
            return None
        if not form.encode(memory, target[:code_bytes]):
            return None
        return CodecHeader(
            code=form.code,
            element=form.element,
            plane_elements=form.plane_elements,
            group_elements=form.group_elements,
            size_bytes=len(memory),
            code_bytes=code_bytes,
        )

    def _decode_lossy(self, header: CodecHeader, source: memoryview, target: memoryview) -> bool:
        try:
            form = CodecFormat(
                element=header.element,
                code=header.code,
                plane_elements=header.plane_elements,
                group_elements=header.group_elements,
            )
            form.decode(source, target)
        except ValueError:  # the header contradicts itself
            return False
        return True

    def _encode_zstd(self, spec: KvSpec | None, memory: memoryview, target: memoryview) -> CodecHeader | None:
        """A frame for each plane of bytes, behind their sizes; None if that takes no fewer bytes."""
        element = spec.parts[0].kv_dtype if spec and len({part.kv_dtype for part in spec.parts}) == 1 else _BYTES
        count = DTYPE_BYTES[element] if element in LOSSY_DTYPES else 1
        if count == 1 or len(memory) % count:
            element, count, planes = _BYTES, 1, memory
        else:
            planes = self._planes.get(len(memory))[: len(memory)]
            codecs.split(element, memory, planes)
        plane_bytes = len(memory) // count
        at = sizes = 8 * count
        for plane in range(count):
            frame = self._compressor().compress(planes[plane * plane_bytes : (plane + 1) * plane_bytes])
            if at + len(frame) >= len(memory):
                return None
            target[at : at + len(frame)] = frame
            target[8 * plane : 8 * plane + 8] = len(frame).to_bytes(8, "little")
            at += len(frame)
        assert at > sizes
        return CodecHeader(code=ZSTD, element=element, size_bytes=len(memory), code_bytes=at)

    def _decode_zstd(self, header: CodecHeader, source: memoryview, target: memoryview) -> bool:
        import zstandard

        count = 1 if header.element == _BYTES else DTYPE_BYTES[header.element]
        if header.size_bytes % count or len(source) < 8 * count:
            return False
        plane_bytes, at = header.size_bytes // count, 8 * count
        planes = target if count == 1 else self._planes.get(len(target))[: len(target)]
        for plane in range(count):
            frame = source[at : at + int.from_bytes(source[8 * plane : 8 * plane + 8], "little")]
            at += len(frame)
            try:
                if zstandard.frame_content_size(frame) != plane_bytes:
                    return False
                planes[plane * plane_bytes : (plane + 1) * plane_bytes] = self._decompressor().decompress(frame)
            except (zstandard.ZstdError, ValueError):
                return False
        if count > 1:
            codecs.join(header.element, planes, target)
        return True

    def _compressor(self) -> Any:
        """The compressor of this thread."""
        if not hasattr(self._zstd, "compressor"):
            import zstandard

            self._zstd.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        return self._zstd.compressor

    def _decompressor(self) -> Any:
        """The decompressor of this thread."""
        if not hasattr(self._zstd, "decompressor"):
            import zstandard

            self._zstd.decompressor = zstandard.ZstdDecompressor()
        return self._zstd.decompressor


def chunk_codec(key: str, name: str, specs: KnownSpecs) -> ChunkCodec | None:
    """The codec of this `name`, set by a `key` of the configuration; None for `none`.

    Raises `ConfigError` if it needs what is not installed.
    """
    if name == ZSTD and find_spec("zstandard") is None:
        raise ConfigError(
            f"{key}: zstd needs zstandard, which is not installed; pip install '.[zstd]' in a clone of lmkv",
            key=key,
        )
    return None if name == "none" else ChunkCodec(name, specs)
