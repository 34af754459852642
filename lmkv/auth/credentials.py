"""A process's TLS certificates, trusted CAs and bearer token. Used by `lmkv.rpc` and by HTTP servers and clients.

A replaced file takes effect at the next connection, without a restart. `CertificateEnd` is the metric of its validity.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lmkv.errors import ConfigError
from lmkv.runtime.reload import Reloadable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
import base64
from dataclasses import field

HEADER = "authorization"


@dataclass(frozen=True, kw_only=True)
class BearerToken:
    """A token as text, or in a file that may be replaced. `repr` shows neither.

    Raises `ConfigError` if both are given, the file cannot be read, or the token is not valid in a header.
    """

    text: str = field(default="", repr=False)
    file: str = ""

    def __post_init__(self) -> None:
        if self.text and self.file:
            raise ConfigError("auth_token and auth_token_file are both set; keep one", key="auth_token_file")
        reloadable = Reloadable(
            [self.file], lambda: _checked(read_secret(self.file, "auth_token_file"), "auth_token_file")
        )
        object.__setattr__(self, "_reloadable", reloadable if self.file else None)
        _checked(self.text, "auth_token")

    def __bool__(self) -> bool:
        return bool(self.text or self.file)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The header to send with a call; empty if there is no token."""
        reloadable: Reloadable[str] | None = self._reloadable  # type: ignore[attr-defined]
        text = reloadable.get() if reloadable else self.text
        return ((HEADER, f"Bearer {text}"),) if text else ()


def read_secret(path: str, key: str) -> str:
    """The secret in a file, without surrounding whitespace. Raises `ConfigError` if it is empty or cannot be read."""
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key}: cannot read {path}: {why}", key=key) from None
    if not text:
        raise ConfigError(f"{key}: {path} is empty", key=key)
    return text


def token_in(authorization: str) -> str:
    """The token in an `Authorization` header: what follows `Bearer`, or the password of `Basic`; empty if none.

    `Basic` is for browsers: they prompt for the password, and send it with every request of a page.
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, or not text
        return ""


def _checked(text: str, key: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{key} must be printable ASCII without spaces, because it is sent in a header", key=key)
    return text


NO_TOKEN = BearerToken()


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """PEM files; empty where none is configured.

    A server uses TLS if it has a certificate, and then requires client certificates issued by `client_ca`, if that is
    set. A client uses TLS if it has a `ca`, and presents its certificate if it has one.
    """

    cert: str = ""
    """This process's certificate chain."""
    key: str = ""
    """The certificate's private key."""
    ca: str = ""
    """CAs that a client trusts for servers."""
    client_ca: str = ""
    """CAs that a server trusts for clients."""
    name: str = ""
    """Name that servers' certificates must be issued for; empty: the name in the address."""
    token: BearerToken = NO_TOKEN
    """The token that a client sends."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` if a file cannot be read, is not valid PEM, or key and certificate do not match."""
        for name, other in (("tls_cert", self.key), ("tls_key", self.cert)):
            if other and not (self.cert and self.key):
                raise ConfigError(f"{name} is missing: a certificate needs tls_cert and tls_key", key=name)
        if self.client_ca and not self.cert:
            raise ConfigError(
                "tls_client_ca needs tls_cert and tls_key: without them nothing is encrypted", key="tls_cert"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for name, path in (("tls_ca", self.ca), ("tls_client_ca", self.client_ca)):
            if path:
                _read(name, path)
                try:
                    context.load_verify_locations(path)
                except ssl.SSLError as error:
                    raise ConfigError(
                        f"{name}: {path} contains no PEM certificate ({error.reason})", key=name
                    ) from None
        if self.cert:
            _read("tls_cert", self.cert)
            _read("tls_key", self.key)
            try:
                context.load_cert_chain(self.cert, self.key)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{self.key} is not the key of the certificate {self.cert}, or one of them is not in PEM "
                    f"({error.reason}); set tls_cert and tls_key to a pair",
                    key="tls_key",
                ) from None

    @property
    def paths(self) -> tuple[str, ...]:
        """All files."""
        return tuple(path for path in (self.cert, self.key, self.ca, self.client_ca) if path)

    def pem(self, name: str) -> bytes | None:
        """Content of the file of a field; None if the field is empty. Raises `ConfigError` if it cannot be read."""
        path = getattr(self, name)
        return _read(f"tls_{name}", path) if path else None

    def server_context(self) -> ssl.SSLContext:
        """Context for servers other than gRPC's. Each connection uses the current content of the files."""

        def make() -> ssl.SSLContext:
            self.__post_init__()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
            return context

        reloadable = Reloadable(self.paths, make)

        def choose(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = reloadable.get()

        context = make()
        context.sni_callback = choose  # called with and without a server name
        return context

    def client_contexts(self) -> Reloadable[ssl.SSLContext]:
        """Contexts for clients other than gRPC's. Without `ca` they trust the CAs of the system."""

        def make() -> ssl.SSLContext:
            self.__post_init__()
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
            return context

        return Reloadable(self.paths, make)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}", key=name) from None


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
