"""Checks the TLS files and the expiry of certificates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

from lmkv.auth.certificates import validity
from lmkv.config import ConnectorConfig, CoordinatorConfig
from lmkv.errors import ConfigError
from lmkv_client.commands.doctor.finding import Finding, fail, ok, warn

SOON_SECONDS = 14 * 86_400.0


def check_tls(config: ConnectorConfig | CoordinatorConfig) -> Iterator[Finding]:
    """Whether the files are valid and no certificate has expired or expires soon."""
    try:
        credentials = config.credentials
    except ConfigError as error:
        yield fail("tls", str(error))
        return
    files = {"tls_cert": credentials.cert, "tls_ca": credentials.ca, "tls_client_ca": credentials.client_ca}
    if not any(files.values()):
        yield ok("tls", "not configured: the control plane is not encrypted")
    for name, path in files.items():
        if path:
            yield _check_validity(name, path)


def _check_validity(name: str, path: str) -> Finding:
    """The certificate of a file that expires first."""
    begin, end = validity(path)
    now = time.time()
    if begin > now:
        return fail(name, f"{path} is not valid before {_day(begin)}; check this host's clock")
    if end < now:
        return fail(name, f"{path} has expired on {_day(end)}; renew it")
    if end < now + SOON_SECONDS:
        return warn(name, f"{path} is valid only until {_day(end)}; renew it")
    return ok(name, f"{path} is valid until {_day(end)}")


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")
