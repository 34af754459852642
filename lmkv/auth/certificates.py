"""How long certificates are valid, read off their files. Used by the doctor and by metrics."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

_VERSION, _UTC_TIME = 0xA0, 0x17
"""DER kinds."""
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def validity(path: str) -> tuple[float, float]:
    """From when to when the certificate of a PEM file that ends first is valid, in seconds since 1970.

    Raises `OSError` if the file cannot be read, `ValueError` if it holds no certificate.
    """
    texts = Path(path).read_text().split(_END)[:-1]
    spans = [_span(ssl.PEM_cert_to_DER_cert(text[text.index(_BEGIN) :] + _END)) for text in texts]
    return min(spans, key=lambda span: span[1])


def _span(der: bytes) -> tuple[float, float]:
    _, certificate, _ = _element(der)
    _, fields, _ = _element(certificate)
    kind, _, rest = _element(fields)
    for _ in range(3 if kind == _VERSION else 2):  # version, serial number, algorithm; then issuer
        kind, _, rest = _element(rest)
    _, span, _ = _element(rest)
    begin_kind, begin, rest = _element(span)
    end_kind, end, _ = _element(rest)
    return _moment(begin_kind, begin), _moment(end_kind, end)


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Kind and content of the first DER element, and what follows it."""
    if len(der) < 2:
        raise ValueError("the certificate is cut short")
    kind, size, start = der[0], der[1], 2
    if size & 0x80:
        start = 2 + (size & 0x7F)
        size = int.from_bytes(der[2:start], "big")
    return kind, der[start : start + size], der[start + size :]


def _moment(kind: int, text: bytes) -> float:
    pattern = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), pattern).replace(tzinfo=UTC).timestamp()
