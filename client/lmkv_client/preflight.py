"""Checks of an engine's configuration before it loads its model: what its connector or its node would refuse later.

They are a subset of `lmkv doctor`: only what ends the start of an engine. What may change by then, such as a node or a
coordinator that does not respond yet, does not.

Every process of vLLM imports this module, also without a connector of lmkv: the functions import what they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkv.errors import ConfigError

if TYPE_CHECKING:
    from lmkv.config import ConnectorConfig

KV_CONNECTOR, ENCODER_CONNECTOR = "LMKVConnector", "LMKVECConnector"
KV_PLACE, ENCODER_PLACE = "kv_connector_extra_config", "ec_connector_extra_config"
SEVERAL = "MultiConnector"


def connector_config(extra: Mapping[str, Any] | None) -> ConnectorConfig:
    """The configuration of an engine's connector; `kv_connector_extra_config` has precedence. Raises `ConfigError`."""
    return _load(extra or {}, KV_PLACE)


def encoder_config(kv_transfer_config: Any, ec_transfer_config: Any) -> ConnectorConfig:
    """The configuration of an engine's encoder connector: that of its `LMKVConnector`, if it has one, and its own."""
    flags: dict[str, Any] = {}
    if _field(kv_transfer_config, "kv_connector") == KV_CONNECTOR:
        flags |= _field(kv_transfer_config, KV_PLACE) or {}
    flags |= _field(ec_transfer_config, ENCODER_PLACE) or {}
    return _load(flags, ENCODER_PLACE)


def _load(flags: Mapping[str, Any], place: str) -> ConnectorConfig:
    from lmkv.config import ConnectorConfig, load

    return load(ConnectorConfig, flags=dict(flags), flags_place=place)


def configs(kv_transfer_config: Any, ec_transfer_config: Any) -> Iterator[ConnectorConfig]:
    """The configurations of an engine's connectors of lmkv, also inside a `MultiConnector`. Raises `ConfigError`."""
    own = {"kv_connector": _field(kv_transfer_config, "kv_connector"), KV_PLACE: _field(kv_transfer_config, KV_PLACE)}
    others = (own[KV_PLACE] or {}).get("connectors") if own["kv_connector"] == SEVERAL else None
    for connector in (own, *(others or ())):
        if _field(connector, "kv_connector") == KV_CONNECTOR:
            yield connector_config(_field(connector, KV_PLACE))
    if _field(ec_transfer_config, "ec_connector") == ENCODER_CONNECTOR:
        yield encoder_config(kv_transfer_config, ec_transfer_config)


def _field(config: Any, name: str) -> Any:
    """A field of vLLM's configuration, or of the dictionary that it will be made of."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def check(config: ConnectorConfig) -> None:
    """Raises `ConfigError` if the node that the connector would start cannot start on this host.

    With `node_address` there is none, and the node that runs already has been checked.
    """
    from lmkv.auth.authenticator import Authenticator
    from lmkv.config import as_written
    from lmkv_client.commands.doctor import finding, host, transfer

    if config.node_address or host.node_runs(config):
        return
    config.make_instance_dir()
    _ = (
        config.engine_socket,
        config.peer_tls,
        config.metrics_tls,
        Authenticator(config.auth_tokens, config.credentials.token),
    )
    for checks in (
        host.check_memory,
        host.check_pool,
        host.check_peer_port,
        host.check_metrics_port,
        finding.check_remote_package,
        finding.check_encryption,
        transfer.check_library,
    ):
        for found in checks(config):
            if found.level == "fail":
                raise ConfigError(as_written(_text(found), config.written))


def _text(found: Any) -> str:
    """The text of a finding, with its key in front."""
    from lmkv.config import ConnectorConfig, keys

    is_named = found.check not in keys(ConnectorConfig) or found.text.startswith(found.check)
    return found.text if is_named else f"{found.check}: {found.text}"


def waits_for_node(config: ConnectorConfig) -> str:
    """The socket of the shared node, if none listens there; empty otherwise."""
    from lmkv_client.engine.node.launcher import listens

    path = config.node_address.removeprefix("unix:")
    return path if path and not listens(Path(path)) else ""
