"""Keys that encrypt chunks at rest, made for a measurement."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from lmkv_server.node.tiers.encryption import ChunkEncryption, TenantKeys


def encryption_in(folder: Path) -> ChunkEncryption:
    """Encryption with one random key, whose file is in this folder."""
    path = folder / "encryption-keys"
    path.write_text(f"bench {base64.b64encode(os.urandom(32)).decode()}\n")
    path.chmod(0o600)
    return ChunkEncryption(TenantKeys(str(path)), "bench")
