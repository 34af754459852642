"""The authenticator: which callers it accepts, and the errors that the others get."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lmkv.auth import authenticator as gate_module
from lmkv.auth.authenticator import TENANT_HEADER, Authenticator, exposure, is_loopback
from lmkv.auth.caller import ANONYMOUS_CALLER, check_caller, current_caller
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.errors import ConfigError, PermissionDenied, TooManyRequests, Unauthenticated
from lmkv.telemetry.logs import LimitedLogger
from tests.support.certificates import issue
from tests.support.tokens import bearer, entry, write

LOOKUP, MOVE = "lmkv.v1.CacheService/Lookup", "lmkv.v1.CacheService/Move"
PROBE = "grpc.health.v1.Health/Check"
INIT = "lmkv.v1.PeerService/Init"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.yaml"


def test_without_a_token_file_all_callers_pass() -> None:
    authenticator = Authenticator()
    assert authenticator.is_open
    assert authenticator.authenticate(MOVE, None) is ANONYMOUS_CALLER
    assert authenticator.authenticate(MOVE, bearer("whatever")) is ANONYMOUS_CALLER


def test_who_passes_is_the_caller_while_it_passes(path: Path) -> None:
    authenticator = Authenticator(write(path, entry("operator", "a")))
    with authenticator.authorized_call(MOVE, bearer("operator-of-a-token")) as caller:
        assert current_caller() is caller
        assert (caller.name, caller.tenant) == ("operator-of-a", "a")
    assert current_caller() is ANONYMOUS_CALLER


@pytest.mark.parametrize("metadata", [None, [], bearer(""), [("authorization", "reader-token")]])
def test_a_caller_without_a_token_learns_which_key_to_set(path: Path, metadata: list[tuple[str, str]] | None) -> None:
    authenticator = Authenticator(write(path, entry("reader")))
    with pytest.raises(Unauthenticated, match="the call has no token; set auth_token or auth_token_file"):
        authenticator.authenticate(LOOKUP, metadata)
    assert authenticator.authenticate(PROBE, metadata) is ANONYMOUS_CALLER


def test_refusals_name_the_fix_and_never_the_token(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authenticator = Authenticator(write(path, entry("reader")))
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(Unauthenticated, match="list its SHA-256 in the file of auth_tokens") as unknown:
            authenticator.authenticate(LOOKUP, bearer("s3cret"))
        with pytest.raises(
            PermissionDenied, match=r"reader is reader, and .*/Move is open to admin or operator"
        ) as denied:
            authenticator.authenticate(MOVE, bearer("reader-token"))
    assert len(caplog.records) == 2
    for text in (caplog.text, str(unknown.value), str(denied.value), str(denied.value.metadata)):
        assert "s3cret" not in text
        assert "reader-token" not in text


def test_refused_calls_leave_a_bounded_number_of_log_lines(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authenticator = Authenticator(write(path, entry("reader")))
    authenticator._log = LimitedLogger(gate_module.logger, interval_seconds=3600.0)
    for token in ("", "unknown"):
        for _ in range(50):
            with pytest.raises(Unauthenticated):
                authenticator.authenticate(LOOKUP, bearer(token))
    assert len(caplog.records) == 1
    authenticator._log._interval_seconds = 0.0
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(LOOKUP, None)
    assert caplog.records[-1].message.endswith(" (99 more such lines were omitted)")


def test_a_method_that_the_table_does_not_have_is_nobodys(path: Path) -> None:
    with pytest.raises(PermissionDenied, match="is open to no role"):
        Authenticator(write(path, entry("admin"))).authenticate("lmkv.v1.CacheService/Drop", bearer("admin-token"))


def test_a_file_that_is_replaced_counts_at_once_also_for_streams(path: Path) -> None:
    authenticator = Authenticator(write(path, entry("reader"), entry("engine")))
    with authenticator.authorized_call(LOOKUP, bearer("reader-token")):
        check_caller()
        write(path, entry("engine"))
        with pytest.raises(Unauthenticated, match="was removed, or its role or tenant"):
            check_caller()
    check_caller()  # the anonymous caller
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(LOOKUP, bearer("reader-token"))
    path.write_text("nonsense")
    assert authenticator.authenticate(LOOKUP, bearer("engine-token")).name == "engine"  # unchanged


def test_a_token_that_changes_its_role_is_another_caller(path: Path) -> None:
    authenticator = Authenticator(write(path, entry("operator")))
    with authenticator.authorized_call(MOVE, bearer("operator-token")):
        write(path, entry("operator") | {"role": "reader"})
        with pytest.raises(Unauthenticated):
            check_caller()


@pytest.mark.parametrize(("before", "after"), [("a", "b"), ("a", ""), ("", "a")])
def test_a_token_that_is_moved_to_another_tenant_ends_its_streams(path: Path, before: str, after: str) -> None:
    one = entry("operator") | {"tenant": before}
    authenticator = Authenticator(write(path, one))
    with authenticator.authorized_call(LOOKUP, bearer("operator-token")):
        check_caller()
        write(path, one | {"tenant": after})
        with pytest.raises(Unauthenticated, match="its role or tenant was changed"):
            check_caller()


def test_an_admins_stream_ends_with_the_tenant_that_it_named(path: Path) -> None:
    authenticator = Authenticator(write(path, entry("admin"), entry("reader", "b")))
    with authenticator.authorized_call(LOOKUP, [*bearer("admin-token"), (TENANT_HEADER, "b")]):
        check_caller()
        write(path, entry("admin"), entry("reader", "c"))
        with pytest.raises(Unauthenticated):
            check_caller()


def test_only_an_admin_without_a_tenant_calls_for_others(path: Path) -> None:
    authenticator = Authenticator(
        write(path, entry("admin"), entry("admin", "a"), entry("operator"), entry("reader", "b"))
    )
    of_b = [(TENANT_HEADER, "b")]
    with authenticator.authorized_call(MOVE, bearer("admin-token") + of_b) as admin:
        assert admin.tenant == "b"
        check_caller()
    assert authenticator.authenticate(LOOKUP, bearer("reader-of-b-token") + of_b).tenant == "b"
    for token in ("admin-of-a-token", "operator-token"):
        with pytest.raises(PermissionDenied, match="may not act for tenant b"):
            authenticator.authenticate(LOOKUP, bearer(token) + of_b)
    with pytest.raises(PermissionDenied):  # nor can a caller invent a tenant
        authenticator.authenticate(LOOKUP, [*bearer("admin-token"), (TENANT_HEADER, "c")])


def test_a_node_accepts_its_own_tenant(path: Path) -> None:
    file = write(path, entry("engine", "a"), entry("engine", "b"))
    authenticator = Authenticator(file, BearerToken(text="engine-of-a-token"))
    assert authenticator.authenticate(INIT, bearer("engine-of-a-token")).tenant == "a"
    with pytest.raises(PermissionDenied, match="belongs to another tenant than this node"):
        authenticator.authenticate(INIT, bearer("engine-of-b-token"))
    for own in (BearerToken(), BearerToken(text="unknown")):
        with pytest.raises(ConfigError, match="does not list this process's own token"):
            Authenticator(file, own)


def test_a_call_that_fails_takes_no_place_from_others(path: Path) -> None:
    authenticator = Authenticator(write(path, entry("reader", max_concurrent_requests=1)))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), authenticator.authorized_call(LOOKUP, bearer("reader-token")):
            raise ZeroDivisionError
        with pytest.raises(KeyboardInterrupt), authenticator.authorized_call(LOOKUP, bearer("reader-token")):
            raise KeyboardInterrupt


def test_changed_limits_of_a_token_apply_to_its_next_call(path: Path) -> None:
    authenticator = Authenticator(write(path, entry("reader", max_concurrent_requests=1)))
    with authenticator.authorized_call(LOOKUP, bearer("reader-token")):
        with pytest.raises(TooManyRequests), authenticator.authorized_call(LOOKUP, bearer("reader-token")):
            pass
        write(path, entry("reader", max_concurrent_requests=2))
        with authenticator.authorized_call(LOOKUP, bearer("reader-token")):
            pass


def test_tokens_have_limits_of_their_own(path: Path) -> None:
    authenticator = Authenticator(write(path, entry("reader", max_concurrent_requests=1), entry("engine")))
    with authenticator.authorized_call(LOOKUP, bearer("reader-token")):
        with pytest.raises(TooManyRequests), authenticator.authorized_call(LOOKUP, bearer("reader-token")):
            pass
        with authenticator.authorized_call(LOOKUP, bearer("engine-token")):
            pass
    with authenticator.authorized_call(LOOKUP, bearer("reader-token")):
        pass


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
