"""Certificates made for a test."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trustme

from lmkv.auth.credentials import Credentials


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of one issuer: its own certificate, and one for a server called `localhost` and `127.0.0.1`."""

    ca: str
    cert: str
    key: str

    @property
    def server(self) -> Credentials:
        """A server that accepts clients without a certificate."""
        return Credentials(cert=self.cert, key=self.key)

    @property
    def strict_server(self) -> Credentials:
        """A server that requires client certificates of the issuer."""
        return Credentials(cert=self.cert, key=self.key, client_ca=self.ca)

    @property
    def client(self) -> Credentials:
        """Of a client that shows nothing."""
        return Credentials(ca=self.ca)

    @property
    def known_client(self) -> Credentials:
        """Of a client that shows a certificate."""
        return Credentials(ca=self.ca, cert=self.cert, key=self.key)


def issue(folder: Path, *names: str, expired: bool = False) -> Certificates:
    """A new issuer and a certificate for these names, by default `localhost` and `127.0.0.1`."""
    folder.mkdir(exist_ok=True)
    issuer = trustme.CA()
    span: dict[str, Any] = {
        "not_before": datetime(2020, 1, 1, tzinfo=UTC),
        "not_after": datetime(2021, 1, 1, tzinfo=UTC),
    }
    issued = issuer.issue_cert(*(names or ("localhost", "127.0.0.1")), **(span if expired else {}))
    issuer.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return Certificates(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))


def replace(source: str, target: str) -> None:
    """Puts one file in the place of another, in one step."""
    shutil.copy(source, f"{target}.new")
    Path(f"{target}.new").replace(target)


def swap(folder: Path, certificates: Certificates) -> Certificates:
    """Puts certificates in the place of those that are in a folder, and returns those there."""
    folder.mkdir(exist_ok=True)
    placed = Certificates(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    for source, target in (
        (certificates.ca, placed.ca),
        (certificates.cert, placed.cert),
        (certificates.key, placed.key),
    ):
        replace(source, target)
    return placed
