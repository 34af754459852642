"""The configuration of commands that call a coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv.auth.credentials import Credentials
from lmkv.auth.token import BearerToken
from lmkv.config import common
from lmkv.config.kinds import ADDRESSES
from lmkv.config.schema import Config, key


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
