"""How long certificates are valid, as the library that made them says."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from lmkv.auth.certificates import validity
from tests.support.certificates import issue


@pytest.mark.parametrize("is_expired", [False, True])
def test_a_certificate_is_read_as_it_was_made(tmp_path: Path, is_expired: bool) -> None:
    certificates = issue(tmp_path, expired=is_expired)
    for path in (certificates.cert, certificates.ca):
        made = x509.load_pem_x509_certificate(Path(path).read_bytes())
        assert validity(path) == (made.not_valid_before_utc.timestamp(), made.not_valid_after_utc.timestamp())


def test_of_several_the_one_that_ends_first_counts(tmp_path: Path) -> None:
    old, new = issue(tmp_path / "old", expired=True), issue(tmp_path / "new")
    both = tmp_path / "both.pem"
    both.write_text(Path(new.cert).read_text() + Path(old.cert).read_text())
    assert validity(str(both)) == validity(old.cert)


@pytest.mark.parametrize(
    "content", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----"]
)
def test_a_file_without_a_certificate_is_a_value_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file.pem"
    file.write_text(content)
    with pytest.raises(ValueError):
        validity(str(file))
