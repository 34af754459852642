"""Warnings of a process whose configuration admits more clients than intended."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.auth.exposure import exposure, is_loopback
from tests.support.certificates import issue
from tests.support.tokens import entry, write


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "[::1]", "::1"])
def test_what_only_this_machine_reaches_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    assert exposure(host, Authenticator(), Credentials()) == ""


def test_what_others_reach_needs_tokens_or_certificates_and_tls(tmp_path: Path) -> None:
    certificates = issue(tmp_path)
    authenticator = Authenticator(write(tmp_path / "tokens.yaml", entry("reader")))
    assert "set auth_tokens or tls_client_ca" in exposure("0.0.0.0", Authenticator(), Credentials())
    assert "set auth_tokens or tls_client_ca" in exposure("lmkv.example", Authenticator(), certificates.server)
    assert exposure("0.0.0.0", Authenticator(), certificates.strict_server) == ""
    assert "unencrypted: set tls_cert" in exposure("10.0.0.5", authenticator, Credentials())
    assert exposure("10.0.0.5", authenticator, certificates.server) == ""
