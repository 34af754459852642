"""TLS between two ends, and what is said when they do not agree on it."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lmkv import rpc
from lmkv.auth.credentials import NO_TOKEN, BearerToken, Credentials, token_in, validity
from lmkv.errors import ConfigError, Unreachable
from tests.support.certificates import Certificates, issue, replace, swap


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def serving(credentials: Credentials) -> AsyncIterator[int]:
    server = await rpc.make_server([])
    port = rpc.add_port(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def ask(port: int, credentials: Credentials, host: str = "localhost") -> None:
    """One call. Raises what it fails with, as lmkv's errors."""
    async with rpc.open_channel(f"{host}:{port}", credentials) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_both_ends_speak_tls(certificates: Certificates, host: str) -> None:
    async with serving(certificates.server) as port:
        await ask(port, certificates.client, host)
        await ask(port, certificates.known_client, host)
    async with serving(certificates.strict_server) as port:
        await ask(port, certificates.known_client, host)


async def test_plaintext_to_a_tls_server_says_what_to_set(certificates: Certificates) -> None:
    async with serving(certificates.server) as port:
        with pytest.raises(Unreachable, match="if the server uses TLS, set tls_ca here"):
            await ask(port, rpc.PLAINTEXT)


async def test_tls_to_a_plaintext_server_says_what_to_set(certificates: Certificates) -> None:
    async with serving(rpc.PLAINTEXT) as port:
        with pytest.raises(Unreachable, match="does not use TLS: unset tls_ca here, or set tls_cert and tls_key there"):
            await ask(port, certificates.client)


async def test_a_server_of_another_issuer_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    stranger = issue(tmp_path)
    async with serving(stranger.server) as port:
        with pytest.raises(Unreachable, match="is not issued by a CA in tls_ca"):
            await ask(port, certificates.client)


async def test_a_server_of_another_name_is_refused(tmp_path: Path) -> None:
    elsewhere = issue(tmp_path, "elsewhere.example")
    async with serving(elsewhere.server) as port:
        with pytest.raises(Unreachable, match="is issued for another name than the address"):
            await ask(port, elsewhere.client)


async def test_a_strict_server_requires_certificates_of_its_issuer(certificates: Certificates, tmp_path: Path) -> None:
    stranger = issue(tmp_path)
    unknown = Credentials(ca=certificates.ca, cert=stranger.cert, key=stranger.key)
    async with serving(certificates.strict_server) as port:
        for credentials in (certificates.client, unknown, rpc.PLAINTEXT):
            with pytest.raises(Unreachable, match="if it requires client certificates, tls_cert and tls_key too"):
                await ask(port, credentials)
        await ask(port, certificates.known_client)


def test_files_that_are_wrong_are_named_by_their_key(certificates: Certificates, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no certificate")
    other = issue(tmp_path / "other")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ca": str(tmp_path / "none.pem")}, r"tls_ca: cannot read .*none\.pem: No such file"),
        ({"ca": str(text)}, "tls_ca: .* contains no PEM certificate"),
        ({"cert": certificates.cert, "key": certificates.key, "client_ca": str(text)}, "tls_client_ca: .* contains no"),
        ({"cert": certificates.cert}, "tls_key is missing"),
        ({"key": certificates.key}, "tls_cert is missing"),
        ({"cert": str(tmp_path), "key": certificates.key}, "tls_cert: cannot read"),
        ({"cert": certificates.cert, "key": other.key}, "is not the key of the certificate"),
        ({"cert": str(text), "key": certificates.key}, "not in PEM"),
        ({"client_ca": certificates.ca}, "tls_client_ca needs tls_cert and tls_key"),
    ]
    for files, says in wrong:
        with pytest.raises(ConfigError, match=says):
            Credentials(**files)


async def test_certificates_are_replaced_under_running_ends(tmp_path: Path) -> None:
    first, second = issue(tmp_path / "first"), issue(tmp_path / "second")
    served, shown = swap(tmp_path / "server", first), swap(tmp_path / "client", first)
    async with serving(served.strict_server) as port, rpc.open_channel(f"localhost:{port}", shown.known_client) as line:
        stub: Any = health_pb2_grpc.HealthStub(line)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)

        swap(tmp_path / "server", second)
        await ask(port, second.known_client)
        with pytest.raises(Unreachable):
            await ask(port, first.known_client)
        swap(tmp_path / "client", second)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert not watch.done()  # existing calls continue
        watch.cancel()


async def test_files_that_make_no_pair_leave_the_last_pair_in_place(tmp_path: Path) -> None:
    first, second = issue(tmp_path / "first"), issue(tmp_path / "second")
    served = swap(tmp_path / "server", first)
    async with serving(served.server) as port:
        replace(second.cert, served.cert)  # and the key not yet
        await ask(port, first.client)
        replace(second.key, served.key)
        await ask(port, second.client)


async def test_an_expired_certificate_is_refused_on_either_side(certificates: Certificates, tmp_path: Path) -> None:
    old = issue(tmp_path, expired=True)
    async with serving(old.server) as port:
        with pytest.raises(Unreachable, match="has expired or is not issued by a CA in tls_ca"):
            await ask(port, old.client)
    strict = Credentials(cert=certificates.cert, key=certificates.key, client_ca=old.ca)
    async with serving(strict) as port:
        with pytest.raises(Unreachable):
            await ask(port, Credentials(ca=certificates.ca, cert=old.cert, key=old.key))


async def test_a_name_may_stand_for_the_address(tmp_path: Path) -> None:
    fleet = issue(tmp_path, "lmkv-node")
    async with serving(fleet.server) as port:
        await ask(port, Credentials(ca=fleet.ca, name="lmkv-node"), "127.0.0.1")
        with pytest.raises(Unreachable, match="is issued for another name"):
            await ask(port, Credentials(ca=fleet.ca, name="lmkv-other"), "127.0.0.1")


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


def test_token_files_that_are_wrong_are_named_by_their_key(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for values, says in (
        ({"text": "a", "file": "b"}, "auth_token and auth_token_file are both set; keep one"),
        ({"file": str(tmp_path / "none")}, "auth_token_file: cannot read .*none: No such file"),
        ({"file": str(tmp_path / "empty")}, "auth_token_file: .*empty is empty"),
    ):
        with pytest.raises(ConfigError, match=says):
            BearerToken(**values)
