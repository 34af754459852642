"""A tokens file made for a test."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

Entry = dict[str, Any]


def sha256(token: str) -> str:
    """What a tokens file says of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def entry(role: str, tenant: str = "", name: str = "", **limits: int) -> Entry:
    """The caller with the token `ROLE-token` or `ROLE-of-TENANT-token`."""
    owner = f"{role}-of-{tenant}" if tenant else role
    of_tenant = {"tenant": tenant} if tenant else {}
    return {"name": name or owner, "role": role, "sha256": sha256(f"{owner}-token"), **of_tenant, **limits}


def bearer(token: str) -> list[tuple[str, str]]:
    """The metadata of a call that shows a token."""
    return [("authorization", f"Bearer {token}")]


def write(path: Path, *entries: Entry, **tenants: dict[str, int]) -> str:
    """Writes the file, in one step if it was there before; returns its path."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"tokens": list(entries), "tenants": tenants}))
    new.replace(path)
    return str(path)
