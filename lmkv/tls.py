"""Which certificates a process shows, and which it trusts. `lmkv.rpc` and the HTTP server use them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from lmkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """PEM files, by the configuration keys that name them; empty where there is none.

    A server speaks TLS if it has a certificate, and then lets in only clients that show one of `client_ca`'s, if set.
    A client speaks TLS if it has somebody to trust, and shows its certificate if it has one.
    """

    cert: str = ""
    """This process's certificate, and those between it and its issuer."""
    key: str = ""
    """The certificate's private key."""
    ca: str = ""
    """Issuers of the servers that a client trusts."""
    client_ca: str = ""
    """Issuers of the clients that a server lets in."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` if a file cannot be read, holds no such thing, or the key is another certificate's."""
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
                        f"{name}: {path} holds no certificate in PEM ({error.reason})", key=name
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

    def pem(self, name: str) -> bytes | None:
        """What a file holds; None if there is none. Raises `ConfigError`."""
        path = getattr(self, name)
        return _read(f"tls_{name}", path) if path else None


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}", key=name) from None
