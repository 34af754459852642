"""Certificates made for a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme

from lmkv.tls import Tls


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of one issuer: its own certificate, and one for a server called `localhost` and `127.0.0.1`."""

    ca: str
    cert: str
    key: str

    @property
    def server(self) -> Tls:
        """Of a server that lets anybody in."""
        return Tls(cert=self.cert, key=self.key)

    @property
    def strict_server(self) -> Tls:
        """Of a server that lets in only whom the issuer knows."""
        return Tls(cert=self.cert, key=self.key, client_ca=self.ca)

    @property
    def client(self) -> Tls:
        """Of a client that shows nothing."""
        return Tls(ca=self.ca)

    @property
    def known_client(self) -> Tls:
        """Of a client that shows a certificate."""
        return Tls(ca=self.ca, cert=self.cert, key=self.key)


def issue(folder: Path, *names: str) -> Certificates:
    """A new issuer and a certificate for these names, `localhost` and `127.0.0.1` unless told otherwise."""
    folder.mkdir(exist_ok=True)
    issuer = trustme.CA()
    issued = issuer.issue_cert(*(names or ("localhost", "127.0.0.1")))
    issuer.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return Certificates(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
