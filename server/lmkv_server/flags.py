"""Flags and examples of the server commands. Help and completion import only this module, which must be fast."""

from __future__ import annotations

import argparse
from functools import partial

from lmkv.cli import Command, subcommand
from lmkv.config import CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig, WebhookConfig, add_arguments

coordinator = Command(
    name="coordinator",
    add_arguments=partial(add_arguments, cls=CoordinatorConfig),
    run="lmkv_server.commands:coordinator",
    examples=(
        "  lmkv coordinator                          serve on 127.0.0.1:9000\n"
        "  lmkv coordinator --host 0.0.0.0 --port 9100"
    ),
)


@subcommand(run="lmkv_server.commands:node")
def node(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, NodeConfig)
    parser.add_argument(
        "--linger", action="store_true", help="exit once no engine has been attached for node_linger seconds"
    )
    parser.add_argument(
        "--started-by-connector",
        action="store_true",
        help="set by connectors: an engine of another configuration may replace the node while no engine is attached",
    )


proxy = Command(
    name="proxy",
    add_arguments=partial(add_arguments, cls=ProxyConfig),
    run="lmkv_server.commands:proxy",
    examples=(
        "  lmkv proxy --prefiller-port 7100 --decoder-port 7200     one prefill and one decode engine, on this host\n"
        "  lmkv proxy --num-prefillers 2 --num-decoders 3           at ports 7100, 7101 and 7200, 7201, 7202\n"
        "  lmkv proxy --mode route --policy kv_aware --coordinator HOST:9000 \\\n"
        "      --engine http://10.0.0.7:8000 --engine http://10.0.0.8:8000"
    ),
)

picker = Command(
    name="picker",
    add_arguments=partial(add_arguments, cls=PickerConfig),
    run="lmkv_server.commands:picker",
    examples=(
        "  lmkv picker --host 0.0.0.0 --coordinator lmkv-coordinator:9000 --engine http://vllm.default.svc:8000\n"
        "  lmkv picker --policy least_loaded --engine http://10.0.0.7:8000 --engine http://10.0.0.8:8000"
    ),
)

webhook = Command(
    name="webhook",
    add_arguments=partial(add_arguments, cls=WebhookConfig),
    run="lmkv_server.commands:webhook",
    examples="  lmkv webhook --pod-additions pods.yaml --tls-cert tls.crt --tls-key tls.key",
)
