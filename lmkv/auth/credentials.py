"""A process's TLS certificates, trusted CAs and bearer token. Used by `lmkv.rpc` and by HTTP servers and clients.

A replaced file takes effect at the next connection, without a restart.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from lmkv.auth.token import NO_TOKEN, BearerToken
from lmkv.errors import ConfigError
from lmkv.runtime.reload import Reloadable


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
