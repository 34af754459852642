"""Secrets that the chart expects: those of users, and those that cert-manager makes of `Certificate` resources."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import trustme
import yaml

from tests.cluster.translation import Manifest
from tests.support.tokens import entry


def secret(name: str, data: Mapping[str, bytes]) -> Manifest:
    """A secret with these files."""
    encoded = {key: base64.b64encode(content).decode() for key, content in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "prod"}, "data": encoded}


def issued(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The secrets of all `Certificate` resources, of one issuer."""
    issuer = trustme.CA()
    found = []
    for manifest in manifests:
        if manifest["kind"] == "Certificate":
            spec = manifest["spec"]
            made = issuer.issue_cert(*spec["dnsNames"], common_name=spec["commonName"])
            files = {
                "ca.crt": issuer.cert_pem.bytes(),
                "tls.crt": b"".join(blob.bytes() for blob in made.cert_chain_pems),
                "tls.key": made.private_key_pem.bytes(),
            }
            found.append(secret(spec["secretName"], files))
    return found


def tokens(tenant: str) -> list[Manifest]:
    """The file of tokens, and a token for each role: `tokens`, `engine`, `reader`, `operator`."""
    roles = ("engine", "reader", "operator")
    listed = yaml.safe_dump({"tokens": [entry(role, tenant) for role in roles]}).encode()
    of_roles = [secret(role, {"token": f"{role}-of-{tenant}-token".encode()}) for role in roles]
    return [secret("tokens", {"tokens.yaml": listed}), *of_roles]
