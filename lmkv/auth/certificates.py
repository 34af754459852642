"""The validity period of certificate files, and the Prometheus metric of it. Used by `lmkv doctor` and every server."""

from __future__ import annotations

import ssl
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

METRIC_NAME = "lmkv_certificate_end_timestamp_seconds"

_VERSION, _UTC_TIME = 0xA0, 0x17
"""DER tags."""
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def validity(path: str) -> tuple[float, float]:
    """Begin and end of validity, in seconds since 1970, of the certificate in a PEM file that expires first.

    Raises `OSError` if the file cannot be read, `ValueError` if it contains no certificate.
    """
    texts = Path(path).read_text().split(_END)[:-1]
    spans = [_span(ssl.PEM_cert_to_DER_cert(text[text.index(_BEGIN) :] + _END)) for text in texts]
    return min(spans, key=lambda span: span[1])


class CertificateEnd:
    """Prometheus collector of the end of validity of a certificate file; reads the file at each collection.

    Yields no sample if `path` is empty, or if the file cannot be read, for example while it is being replaced.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering does not collect."""
        return []

    def collect(self) -> list[Metric]:
        """One gauge: the end of the certificate that expires first."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        family = GaugeMetricFamily(
            METRIC_NAME, "End of validity of the certificate in tls_cert, in Unix time, read at each scrape."
        )
        if self._path:
            with suppress(OSError, ValueError):
                family.add_metric([], validity(self._path)[1])
        return [family]


def _span(der: bytes) -> tuple[float, float]:
    _, certificate, _ = _element(der)
    _, fields, _ = _element(certificate)
    tag, _, rest = _element(fields)
    for _ in range(3 if tag == _VERSION else 2):  # version, serial number, algorithm; then issuer
        tag, _, rest = _element(rest)
    _, span, _ = _element(rest)
    begin_tag, begin, rest = _element(span)
    end_tag, end, _ = _element(rest)
    return _timestamp(begin_tag, begin), _timestamp(end_tag, end)


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first DER element, and the bytes after it."""
    if len(der) < 2:
        raise ValueError("the certificate is truncated")
    tag, size, start = der[0], der[1], 2
    if size & 0x80:
        start = 2 + (size & 0x7F)
        size = int.from_bytes(der[2:start], "big")
    return tag, der[start : start + size], der[start + size :]


def _timestamp(tag: int, text: bytes) -> float:
    pattern = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), pattern).replace(tzinfo=UTC).timestamp()
