"""What the commands that ask a coordinator are told."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv.config import common
from lmkv.config.kinds import ADDRESS
from lmkv.config.schema import Config, key
from lmkv.tls import Tls


@dataclass(frozen=True, kw_only=True)
class ClientConfig(Config):
    """What commands that ask the coordinator are told: `lmkv lookup`, `lmkv instances`."""

    coordinator_address: str = key(ADDRESS, "127.0.0.1:9000", "Where the coordinator is.", *common.COORDINATOR_ALIASES)
    tls_ca: str = common.tls_ca()
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()

    @property
    def tls(self) -> Tls:
        """How to speak to the coordinator. Raises `ConfigError` if a file is not what it should be."""
        return Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)
