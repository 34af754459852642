"""Tokens: where they come from, how they travel, and that they do not show."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from lmkv.auth.token import NO_TOKEN, BearerToken, token_in
from lmkv.errors import ConfigError


def test_a_token_travels_as_a_bearer_and_is_found_again() -> None:
    ((name, value),) = BearerToken(text="s3cret").headers()
    assert (name, token_in(value)) == ("authorization", "s3cret")
    assert NO_TOKEN.headers() == ()
    assert not NO_TOKEN


def test_a_file_that_is_replaced_counts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    token = BearerToken(file=str(file))
    assert token.headers()[0][1] == "Bearer first"
    (tmp_path / "new").write_text("second\n")
    (tmp_path / "new").replace(file)
    assert token.headers()[0][1] == "Bearer second"
    file.unlink()
    assert token.headers()[0][1] == "Bearer second"


def test_a_browser_sends_it_as_a_password() -> None:
    assert token_in("Basic " + base64.b64encode(b"me:s3cret:1").decode()) == "s3cret:1"
    for nonsense in ("", "Bearer", "Basic", "Basic %%%", "Digest x", "s3cret"):
        assert token_in(nonsense) == ""


def test_it_does_not_show() -> None:
    assert "s3cret" not in repr(BearerToken(text="s3cret"))


@pytest.mark.parametrize("text", ["two words", "line\nbreak", "naïve"])
def test_what_cannot_be_a_header_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="auth_token must be printable ASCII") as refusal:
        BearerToken(text=text)
    assert text not in str(refusal.value)


def test_files_that_are_wrong_are_named_by_their_key(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for values, says in (
        ({"text": "a", "file": "b"}, "auth_token and auth_token_file are both set; keep one"),
        ({"file": str(tmp_path / "none")}, "auth_token_file: cannot read .*none: No such file"),
        ({"file": str(tmp_path / "empty")}, "auth_token_file: .*empty is empty"),
    ):
        with pytest.raises(ConfigError, match=says):
            BearerToken(**values)
