"""The configurations of commands that call a coordinator, and of the webhook, which Kubernetes calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmkv.auth.credentials import Credentials
from lmkv.auth.token import BearerToken
from lmkv.config import common
from lmkv.config.kinds import ADDRESSES, HOST, PATH, PORT
from lmkv.config.schema import Config, key
from lmkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ClientConfig(Config):
    """Configuration of commands that call the coordinator, such as `lmkv lookup`."""

    coordinator_address: tuple[str, ...] = key(
        ADDRESSES, ("127.0.0.1:9000",), "Address of the coordinator, or of several.", *common.COORDINATOR_ALIASES
    )
    tls_ca: str = common.tls_ca()
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()
    auth_token: str = common.auth_token()
    auth_token_file: str = common.auth_token_file()

    @property
    def credentials(self) -> Credentials:
        """Credentials for the coordinator. Raises `ConfigError` if a file is invalid."""
        token = BearerToken(text=self.auth_token, file=self.auth_token_file)
        return Credentials(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, token=token)


@dataclass(frozen=True, kw_only=True)
class WebhookConfig(Config):
    """Configuration of `lmkv webhook`."""

    host: str = key(HOST, "127.0.0.1", "Address to bind; 0.0.0.0 for all.")
    port: int = key(PORT, 9443, "HTTPS port that Kubernetes calls; 0: a free one.")
    pod_additions: str = key(
        PATH, "", "YAML file of what is added to pods of engines, which the chart renders; required."
    )
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()
    log_level: str = common.log_level()
    log_format: str = common.log_format()

    def missing(self) -> Iterator[ConfigError]:
        if not self.pod_additions:
            yield ConfigError("pod_additions is missing: name the file that the chart renders", key="pod_additions")
        if not self.tls_cert:
            yield ConfigError("tls_cert is missing: Kubernetes calls webhooks over HTTPS only", key="tls_cert")

    @property
    def credentials(self) -> Credentials:
        """Credentials of the server. Raises `ConfigError` if a file is invalid."""
        return Credentials(cert=self.tls_cert, key=self.tls_key)
