"""Whether the TLS files are what they should be, and for how long."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from lmkv.config import ConnectorConfig, CoordinatorConfig
from lmkv.errors import ConfigError
from lmkv_client.commands.doctor.finding import Finding, fail, ok, warn

SOON_SECONDS = 14 * 86_400.0
_VERSION, _UTC_TIME = 0xA0, 0x17
"""DER kinds."""
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def check_tls(config: ConnectorConfig | CoordinatorConfig) -> Iterator[Finding]:
    """Whether the files can be used, and none of their certificates is out of date or will soon be."""
    try:
        credentials = config.credentials
    except ConfigError as error:
        yield fail("tls", str(error))
        return
    files = {"tls_cert": credentials.cert, "tls_ca": credentials.ca, "tls_client_ca": credentials.client_ca}
    if not any(files.values()):
        yield ok("tls", "not configured: words travel in the clear")
    for name, path in files.items():
        if path:
            yield _check_validity(name, path)


def _check_validity(name: str, path: str) -> Finding:
    """The certificate of a file that ends first."""
    texts = Path(path).read_text().split(_END)[:-1]
    begin, end = min((validity(ssl.PEM_cert_to_DER_cert(_trim(text))) for text in texts), key=lambda span: span[1])
    now = time.time()
    if begin > now:
        return fail(name, f"{path} is not valid before {_day(begin)}; check this host's clock")
    if end < now:
        return fail(name, f"{path} has been out of date since {_day(end)}; renew it")
    if end < now + SOON_SECONDS:
        return warn(name, f"{path} is valid only until {_day(end)}; renew it")
    return ok(name, f"{path} is valid until {_day(end)}")


def validity(der: bytes) -> tuple[float, float]:
    """From when to when a certificate is valid, in seconds since 1970."""
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
    kind, size, start = der[0], der[1], 2
    if size & 0x80:
        start = 2 + (size & 0x7F)
        size = int.from_bytes(der[2:start], "big")
    return kind, der[start : start + size], der[start + size :]


def _moment(kind: int, text: bytes) -> float:
    pattern = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), pattern).replace(tzinfo=UTC).timestamp()


def _trim(text: str) -> str:
    return text[text.index(_BEGIN) :] + _END


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")
