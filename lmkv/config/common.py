"""Keys that several processes share, and refusals of `require_encryption`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lmkv.auth import cache_salts
from lmkv.config.kinds import FLAG, HOST_NAMES, PATH, SECRET, Kind, choice, whole
from lmkv.config.schema import key
from lmkv.errors import ConfigError

COORDINATOR_ALIASES = ("coordinator", "controller_pull_url", "controller_url")
"""Aliases of `coordinator_address`; the latter two are of LMCache."""
LOG_LEVEL = choice("debug", "info", "warning", "error")
LOG_FORMAT = choice("text", "json")
PRIVATE_CHANNELS = ("auto", "shm", "tcp")
"""Values of `transfer_channel` that encrypt what leaves the host."""


def cluster_secret() -> Any:
    """Declares `cluster_secret`."""
    doc = "Secret for chunk keys and proofs of handoffs, the same in the whole fleet; no flag takes it."
    return key(SECRET, "", doc)


def tls_ca() -> Any:
    """Declares `tls_ca`."""
    return key(PATH, "", "PEM file of the CAs of the coordinator's certificate; enables TLS.")


def tls_cert() -> Any:
    """Declares `tls_cert`."""
    return key(PATH, "", "PEM file of this process's certificate.")


def tls_key() -> Any:
    """Declares `tls_key`."""
    return key(PATH, "", "PEM file of the private key of `tls_cert`.")


def tls_client_ca(doc: str) -> Any:
    """Declares `tls_client_ca`; `doc` says what an empty value means."""
    return key(PATH, "", f"PEM file of the CAs of clients' certificates; empty: {doc}.")


def require_encryption(what: str) -> Any:
    """Declares `require_encryption`; `what` is what it refuses."""
    return key(FLAG, False, f"Whether {what} is refused, when the process starts or connects.")


def auth_token() -> Any:
    """Declares `auth_token`."""
    return key(SECRET, "", "Token to send with all calls; no flag takes it.")


def auth_token_file() -> Any:
    """Declares `auth_token_file`."""
    return key(PATH, "", "File that contains the token, instead of `auth_token`.")


def auth_tokens() -> Any:
    """Declares `auth_tokens`."""
    return key(PATH, "", "YAML file of the tokens whose owners may call the server, with roles; empty: any client may.")


def allowed_hosts() -> Any:
    """Declares `allowed_hosts`."""
    return key(
        HOST_NAMES,
        (),
        "Host names by which clients may call the server over HTTP, besides addresses and localhost, such as "
        "lmkv.example.com or *.svc.cluster.local; others are refused.",
        shown_default="every name, or none on a loopback address",
    )


def max_connections_per_client(default: int) -> Any:
    """Declares `max_connections_per_client`."""
    return key(
        whole(1, 1 << 20, "a number of connections above 0"),
        default,
        "Maximum HTTP connections of one client address; beyond it idle ones are closed first, then requests get 429.",
    )


def cache_salt_policy() -> Any:
    """Declares `cache_salt_policy`."""
    return key(
        choice(*cache_salts.POLICIES),
        cache_salts.NONE,
        "Whose requests share cached prompts: none (those that send the same `cache_salt`), tenant (of one tenant's "
        "tokens), or user (of one user of a tenant); tenant and user need auth_tokens and cluster_secret.",
    )


def user_header(kind: Kind[str]) -> Any:
    """Declares `user_header`."""
    return key(
        kind,
        "",
        "Header in which the tenant's gateway names the user, for cache_salt_policy user.",
        shown_default="empty: OpenAI's `user` names it",
    )


def missing_for_salts(policy: str, tokens: str, secret: str) -> Iterator[ConfigError]:
    """An error for each key without which salts cannot be derived by the policy."""
    for name, value in (("auth_tokens", tokens), ("cluster_secret", secret)):
        if policy != cache_salts.NONE and not value:
            yield ConfigError(
                f"cache_salt_policy is {policy}, which needs {name}; set it, or cache_salt_policy to none", key=name
            )


def log_level() -> Any:
    """Declares `log_level`."""
    return key(LOG_LEVEL, "info", "Minimum severity of messages to log.")


def log_format() -> Any:
    """Declares `log_format`."""
    return key(LOG_FORMAT, "text", "Log format: text, or one JSON object per line.")


class Gap(NamedTuple):
    """Something that is not encrypted."""

    key: str
    """The configuration key that decides."""
    why: str
    fix: str


def unencrypted(gaps: Iterable[Gap]) -> Iterator[ConfigError]:
    for gap in gaps:
        yield ConfigError(f"require_encryption: {gap.key}: {gap.why}; {gap.fix}", key=gap.key)
