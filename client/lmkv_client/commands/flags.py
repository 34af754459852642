"""Flags and examples of the commands.

Help and completion import this module only, so it imports neither gRPC, protobuf, NumPy nor asyncio. Each command
names the function that runs it, whose module is imported when the command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lmkv.cli import Command, subcommand
from lmkv.errors import BadRequest
from lmkv.hints import HintAction
from lmkv.units import parse_seconds

if TYPE_CHECKING:
    from lmkv.v1.chunk_pb2 import Position

EXIT_CODES = """\
exit codes:
  0  done                1  rejected or failed     2  bad usage or configuration
  3  done for some of the chunks only             130  interrupted; the operation continues"""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the coordinator's address and the output format. Shells complete instances among the arguments so far."""
    for action in parser._actions:
        if str(action.metavar).startswith("INSTANCE"):
            vars(action)["completer"] = _complete_instances
    _add_coordinator(parser, "the coordinator (default: coordinator_address of the configuration, else 127.0.0.1:9000)")
    parser.add_argument("--config", metavar="FILE", help="YAML file to read (default: $LMKV_CONFIG_FILE)")
    parser.add_argument("--json", action="store_true", help="print JSON with the field names of the API")


def _add_coordinator(parser: argparse.ArgumentParser, help_: str) -> None:
    """Adds `--coordinator`. What people type instead means the same, but is not listed."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=help_)
    guesses = ("--coordinator-address", "--address", "--server")
    parser.add_argument(*guesses, dest="coordinator", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _complete_instances(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    from lmkv_client.commands.calls import instance_ids  # it calls the coordinator, over gRPC

    return instance_ids(prefix, parsed_args)


def _read_position(text: str) -> Position:
    """Argument type: `INSTANCE` or `INSTANCE/TIER`."""
    from lmkv.tiers import parse_position  # a position is a message, and protobuf takes long to import

    try:
        return parse_position(text)
    except BadRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_seconds(text: str) -> float:
    """Argument type: a duration above 0."""
    try:
        seconds = parse_seconds(text)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"must be a time above 0, such as 30 (seconds) or 10m, not {text!r}")
    return seconds


def add_chunk_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the flags that name chunks."""
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--tokens", metavar="ID,ID,...", help="token ids of the prompt")
    prompt.add_argument(
        "--tokens-file", metavar="FILE", help="file with the token ids as a JSON list; -: standard input"
    )
    prompt.add_argument("--keys", metavar="HEX,HEX,...", help="keys of the prompt's chunks, 32 hex digits each")
    prompt.add_argument("--prompt", metavar="TEXT", help="text of the prompt; requires the model's folder")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model or LoRA adapter, by its served name; with --prompt the model's folder",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder with tokenizer.json, if --model is only a name")
    parser.add_argument("--cache-salt", metavar="SALT", default="", help="cache salt of the prompt")
    parser.add_argument("--lora", metavar="NAME", default="", help="LoRA adapter of the prompt, by name or name@digest")


def add_waiting_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds whether and how long to wait for the operation."""
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the operation is started")
    add_timeout_argument(parser)


def add_timeout_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the deadline."""
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=read_seconds,
        help="deadline, such as 30s, after which the operation continues (default: 15m)",
    )


@subcommand(
    run="lmkv_client.commands.prompts:look_up",
    examples="""\
  lmkv lookup --tokens 128000,849,21435,279
  lmkv lookup --prompt "Explain the significance of KV cache." --model /models/llama
  curl -s localhost:8000/tokenize -d '{"prompt": "Hi"}' | jq .tokens | lmkv lookup --tokens-file -
  lmkv lookup --tokens-file prompt.json --model llama --coordinator 10.0.0.5:9000 --json""",
)
def lookup(parser: argparse.ArgumentParser) -> None:
    add_chunk_arguments(parser)
    add_common_arguments(parser)


@subcommand(
    run="lmkv_client.commands.prompts:explain",
    examples="""\
  lmkv explain --tokens-file prompt.json
  lmkv explain --prompt "Explain the significance of KV cache." --model /models/llama --instance lmkv-1
  lmkv explain --tokens-file prompt.json --proxy http://proxy:9100     also which engine the proxy would choose
  lmkv explain --request cmpl-4f1c                 a request by the id in its answer, as its engine reports it""",
)
def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--request", metavar="ID", default="", help="an engine's id of a request, or a part of it")
    parser.add_argument("--instance", metavar="INSTANCE", default="", help="ask this instance only")
    parser.add_argument(
        "--proxy",
        metavar="URL",
        default="",
        help="show what the prompt would cost at each engine of this proxy, or of the picker with this metrics port",
    )
    add_chunk_arguments(parser, required=False)
    add_common_arguments(parser)


@subcommand(
    run="lmkv_client.commands.prompts:hint",
    examples="""\
  lmkv hint prefetch --at lmkv-1 --tokens-file session.json
  lmkv hint retain --at lmkv-1 --ttl 10m --priority 80 --tokens-file session.json
  lmkv hint evict --at lmkv-1 --prompt "You are a helpful assistant." --model /models/llama --json""",
)
def hint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=[action.value for action in HintAction], help="what to do with the chunks")
    parser.add_argument("--at", metavar="INSTANCE", required=True, help="instance that carries it out")
    parser.add_argument(
        "--ttl", metavar="TIME", type=read_seconds, help="pin, retain: duration, such as 10m (default: 5m)"
    )
    parser.add_argument(
        "--priority",
        metavar="NUMBER",
        type=int,
        default=0,
        help="retain: 1 to 100 (default: 50); chunks of lower priority are evicted first",
    )
    add_chunk_arguments(parser)
    add_common_arguments(parser)


@subcommand(
    run="lmkv_client.commands.prompts:pin",
    examples="""\
  lmkv pin --at lmkv-1 --tokens 128000,849,21435,279
  lmkv pin --at lmkv-1/host --ttl 10m --prompt "You are a helpful assistant." --model /models/llama
  lmkv pin --at lmkv-1 --tokens-file system-prompt.json --json | jq -r .pin.pin_id""",
)
def pin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--at",
        metavar="INSTANCE[/TIER]",
        type=_read_position,
        required=True,
        help="instance that holds the chunks, and optionally the tier: host (default), disk",
    )
    parser.add_argument(
        "--ttl", metavar="TIME", type=read_seconds, default=300.0, help="duration, such as 10m (default: 5m)"
    )
    add_chunk_arguments(parser)
    add_common_arguments(parser)


pins = Command(
    name="pins",
    add_arguments=add_common_arguments,
    run="lmkv_client.commands.prompts:pins",
    examples="  lmkv pins\n  lmkv pins --json | jq -r '.pins[].pin_id'",
)


@subcommand(
    run="lmkv_client.commands.prompts:unpin",
    examples="  lmkv unpin lmkv-1/0123456789abcdef",
)
def unpin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pin_id", metavar="PIN", help="id of the pin, as `lmkv pin` and `lmkv pins` print it")
    add_common_arguments(parser)


def _add_move_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of both commands."""
    position = "instance, and perhaps its tier: host (default), disk, remote, gpu"
    parser.add_argument(
        "--from", dest="source", metavar="INSTANCE[/TIER]", type=_read_position, required=True, help=position
    )
    parser.add_argument(
        "--to", dest="destination", metavar="INSTANCE[/TIER]", type=_read_position, required=True, help="as --from"
    )
    add_chunk_arguments(parser)
    add_waiting_arguments(parser)
    add_common_arguments(parser)


_MOVE_EXAMPLES = f"""\
  lmkv %(verb)s --from lmkv-1 --to lmkv-2 --tokens 128000,849,21435,279
  lmkv %(verb)s --from lmkv-1/disk --to lmkv-2/host --prompt "Explain KV cache." --model /models/llama
  lmkv %(verb)s --from lmkv-1/host --to lmkv-2 --tokens-file prompt.json --no-wait --json

{EXIT_CODES}"""


move = Command(
    name="move",
    add_arguments=_add_move_arguments,
    run="lmkv_client.commands.operations:move",
    examples=_MOVE_EXAMPLES % {"verb": "move"},
)


copy = Command(
    name="copy",
    add_arguments=_add_move_arguments,
    run="lmkv_client.commands.operations:copy",
    examples=_MOVE_EXAMPLES % {"verb": "copy"},
)


@subcommand(
    run="lmkv_client.commands.operations:clear",
    examples=f"""\
  lmkv clear --tokens 128000,849,21435,279              one prompt, wherever it is
  lmkv clear --model llama --dry-run                    how much of a model there is
  lmkv clear --model llama --weight-version 41          what old weights have computed
  lmkv clear --model llama --keep-weight-version 42     what all other weights have computed
  lmkv clear --all --instance lmkv-1 --tier disk        one tier of one instance
  lmkv clear --all --yes                                everything, without asking

More than one prompt's chunks are cleared only after you have confirmed it, on the terminal or with --yes. Pinned chunks
stay.

{EXIT_CODES}""",
)
def clear(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instance", metavar="INSTANCE", default="", help="only this instance (default: all)")
    parser.add_argument("--tier", metavar="TIER", default="", help="only this tier (default: all)")
    add_chunk_arguments(parser, required=False)
    versions = parser.add_mutually_exclusive_group()
    versions.add_argument(
        "--weight-version", metavar="VERSION", default="", help="with --model: only this version of the weights"
    )
    versions.add_argument(
        "--keep-weight-version",
        metavar="VERSION",
        default="",
        help="with --model: all versions of the weights but this one",
    )
    parser.add_argument("--all", action="store_true", help="all chunks, of any model")
    parser.add_argument("--dry-run", action="store_true", help="only report what would be dropped")
    parser.add_argument(
        "--yes",
        action="store_true",
        help="do not ask for confirmation; required without a terminal to clear more than one prompt's chunks",
    )
    add_waiting_arguments(parser)
    add_common_arguments(parser)


@subcommand(
    run="lmkv_client.commands.operations:drain",
    examples="""\
  lmkv drain engine-1                            to the instances with most free memory
  lmkv drain engine-1 --to engine-2 engine-3     to engine-2, and to engine-3 once that is full
  lmkv drain engine-1 --timeout 2m --evict       destinations may evict other chunks to make room

The chunks are copied: engine-1 keeps them and continues to serve. What its engines store after the drain is not copied,
so stop their traffic first. While no coordinator responds, the command tries again for 30 s.

exit codes:
  0  safe to stop        1  rejected, failed, or nothing was copied     2  bad usage or configuration
  3  some chunks are held by this instance only                       130  interrupted; the operation continues""",
)
def drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("instance", metavar="INSTANCE", help="the instance that is to be stopped")
    parser.add_argument(
        "--to",
        dest="destinations",
        metavar="INSTANCE",
        nargs="+",
        default=[],
        help="destinations in order of preference (default: all others, the one with most free memory first)",
    )
    parser.add_argument(
        "--evict", action="store_true", help="destinations may evict other chunks (default: they use free memory only)"
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=read_seconds,
        default=600.0,
        help="deadline of the drain, such as 2m (default and maximum: 10m)",
    )
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the operation is started")
    add_common_arguments(parser)


@subcommand(
    run="lmkv_client.commands.operations:ops",
    examples=f"""\
  lmkv ops                                  list them, newest first
  lmkv ops --running                        only those that run
  lmkv ops show move-1879f0c2a3b4c5d6       what one did, or how far it is
  lmkv ops wait move-1879f0c2a3b4c5d6 --timeout 30s
  lmkv ops cancel move-1879f0c2a3b4c5d6     what it has done so far stays done

{EXIT_CODES}""",
)
def ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("list", "show", "wait", "cancel"), default="list", help="(default: list)"
    )
    parser.add_argument("operation", nargs="?", metavar="ID", help="the operation; not for list")
    parser.add_argument("--running", action="store_true", help="list only running operations")
    add_timeout_argument(parser)
    add_common_arguments(parser)


instances = Command(
    name="instances",
    add_arguments=add_common_arguments,
    run="lmkv_client.commands.fleet:instances",
    examples="""\
  lmkv instances
  lmkv instances --coordinator 10.0.0.5:9000
  lmkv instances --json | jq '.instances[].instance_id'""",
)


@subcommand(
    run="lmkv_client.commands.fleet:top",
    examples="""\
  lmkv top                    until Ctrl-C
  lmkv top --interval 5s
  lmkv top --once             one frame, as without a terminal""",
)
def top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", metavar="TIME", type=read_seconds, default=1.0, help="time between frames (default: 1s)"
    )
    parser.add_argument("--once", action="store_true", help="show one frame and exit")
    add_common_arguments(parser)


@subcommand(
    run="lmkv_client.commands.layout:watch",
    examples="""\
  lmkv watch                          current chunks, then every change; Ctrl-C stops
  lmkv watch --model llama            of one model only
  lmkv watch --json | jq -c '.changes[] | select(.instance_gone)'
  lmkv watch --from-revision 1793254412345678 --json

The watch resumes after a restart of the coordinator. If changes were missed, it prints that and starts with all chunks
that are held; in JSON that update has `reset`.""",
)
def watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from-revision", metavar="N", type=int, default=0, help="only changes after this revision")
    parser.add_argument("--model", metavar="NAME", help="only chunks of this model (default: all)")
    add_common_arguments(parser)


TOPIC = "kv@{instance}@{model}"


BUFFER_BATCHES = 10_000


@subcommand(
    run="lmkv_client.commands.layout:events",
    examples="""\
  lmkv events                                      publish on port 5557 of this host, replay on port 5558
  lmkv events --endpoint 'tcp://*:5557' --replay-endpoint 'tcp://*:5558' --token-file /etc/lmkv/events-token
  lmkv events --instance node-1 --topic kv-events  one node, as one vLLM engine would publish it
  lmkv events --endpoint tcp://router:5557         connect to a router that collects events of many publishers
  lmkv events --endpoint ipc:///run/kv --replay-endpoint ipc:///run/kv-replay

Every chunk is one block: its hash is the chunk's key, its size the tokens of a chunk, its medium CPU (host memory) or
STORAGE (disk). Token ids and parents are empty, since the layout map does not have them: compute the keys of a prompt
and look them up, or read the events of the engines, which have vLLM's blocks and tokens.

Numbers of batches rise across restarts. A consumer that sees a gap sends the first number that it misses (8 bytes, big
endian; a second frame may name the topic) to the replay endpoint. If that is too old, it gets AllBlocksCleared and all
that is held. By default only this host can connect. With --token-file consumers authenticate by ZMQ's PLAIN mechanism,
as user `lmkv` with the token as password; the token and the events are not encrypted.""",
)
def events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint", metavar="ZMQ", default="tcp://127.0.0.1:5557", help="publishes here (default: %(default)s)"
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="ZMQ",
        default="tcp://127.0.0.1:5558",
        help="answers requests for missed batches here; empty: nowhere (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file", metavar="PATH", type=Path, help="only consumers with the token in this file are served"
    )
    parser.add_argument(
        "--topic", default=TOPIC, help="topic of an instance and a model (default: kv@{instance}@{model})"
    )
    parser.add_argument(
        "--instance", metavar="INSTANCE", default="", help="only chunks of this instance (default: all)"
    )
    parser.add_argument("--model", metavar="NAME", help="only chunks of this model (default: all)")
    parser.add_argument(
        "--buffer", metavar="BATCHES", type=int, default=BUFFER_BATCHES, help="batches kept for replay (default: 10000)"
    )
    parser.add_argument(
        "--hashes",
        choices=("int", "bytes"),
        default="int",
        help="keys as vLLM shortens its hashes, the last 8 bytes as an integer, or whole (default: int)",
    )
    add_common_arguments(parser)


@subcommand(
    run="lmkv_client.commands.engines:run",
    examples="""\
  lmkv engines                                          list the engines of the proxy at 127.0.0.1:9100
  lmkv engines --proxy http://proxy:9100 --json         of another proxy, as JSON
  lmkv engines add http://10.0.0.9:8000                 an engine of a proxy in mode route
  lmkv engines add http://10.0.0.9:8000 --role decode   of a proxy in mode pd
  lmkv engines add dns://vllm.default.svc:8000          each address of the name is an engine
  lmkv engines drain http://10.0.0.7:8000               wait until its requests have ended, then stop it
  lmkv engines remove http://10.0.0.7:8000              at once: its requests are repeated on other engines

Changes last until the proxy restarts; a file that `engines_file` of the proxy names is read again after each change. If
the proxy has auth_tokens, set auth_token or auth_token_file to a token of an operator.

exit codes:
  0  done      1  rejected, failed, or not drained in time     2  bad usage     130  interrupted; a drain continues""",
)
def engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("list", "add", "drain", "remove"), default="list", help="(default: list)"
    )
    parser.add_argument(
        "url", nargs="?", metavar="URL", help="the engine, as http://HOST:PORT, or dns://NAME:PORT; not for list"
    )
    parser.add_argument(
        "--role", choices=("prefill", "decode", "both"), help="add: what the engine does; needed if the mode is pd"
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=read_seconds,
        default=600.0,
        help="drain: time to wait, after which the drain continues (default: 10m)",
    )
    parser.add_argument("--no-wait", action="store_true", help="drain: return at once")
    parser.add_argument(
        "--proxy",
        metavar="URL",
        default="http://127.0.0.1:9100",
        help="the proxy (default: http://127.0.0.1:9100)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file to read (default: $LMKV_CONFIG_FILE)")
    parser.add_argument("--json", action="store_true", help="print JSON with the field names of the API")


CONFIGURED_PROCESSES = ("connector", "node", "coordinator", "proxy", "picker", "webhook", "client")


@subcommand(
    run="lmkv_client.commands.config:run",
    examples="""\
  lmkv config import lmcache.yaml                       print it as lmkv's, and what became of each key
  lmkv config import lmcache.yaml --output lmkv.yaml    write it there, unless there is such a file
  lmkv config check lmkv.yaml                           print what an engine's connector makes of it
  lmkv config check lmkv.yaml --process coordinator     what a coordinator does
  lmkv config check --changed                           only what file, environment and LMCache's files set
""",
)
def config(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    importing = actions.add_parser("import", help="convert LMCache's YAML to lmkv's", allow_abbrev=False)
    importing.add_argument("file", metavar="FILE", type=Path, help="LMCache's configuration")
    importing.add_argument("--output", metavar="FILE", type=Path, help="output file (default: standard output)")
    importing.add_argument("--force", action="store_true", help="overwrite the output file")
    checking = actions.add_parser("check", help="print all keys with their sources, or all errors", allow_abbrev=False)
    checking.add_argument("file", metavar="FILE", type=Path, nargs="?", help="lmkv's YAML (default: $LMKV_CONFIG_FILE)")
    checking.add_argument(
        "--process", choices=CONFIGURED_PROCESSES, default="connector", help="its process (default: connector)"
    )
    checking.add_argument("--changed", action="store_true", help="print only keys that are not at their default")


@subcommand(
    run="lmkv_client.commands.doctor.command:run",
    examples="""\
  lmkv doctor                                  a host with engines, as $LMKV_CONFIG_FILE and LMKV_... set it up
  lmkv doctor --config lmkv.yaml               the same, by this file
  lmkv doctor coordinator --config head.yaml   a host that is to run a coordinator
  lmkv doctor --fleet --coordinator head:9000  coordinators and all instances, from any host that reaches them
  lmkv doctor --json | jq '.[] | select(.level != "ok")'

Nothing is changed, but the fleet sees an instance doctor-... come and go: it tries clock and keys.

exit codes:
  0  passed, possibly with warnings  1  a check failed     2  bad usage     130  interrupted""",
)
def doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "role",
        nargs="?",
        choices=("engine", "coordinator"),
        default="engine",
        help="what the host is to run: engines and their node, or a coordinator (default: engine)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file to check (default: $LMKV_CONFIG_FILE)")
    _add_coordinator(parser, "the coordinator, whatever the configuration says")
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="check the coordinators and every registered instance instead of this host",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")


@subcommand(
    run="lmkv_client.demo.command:run",
    examples="""\
  lmkv demo                                     two vLLM engines: one loads what the other has computed
  lmkv demo --engines vllm,sglang --sglang-python .venv-sglang/bin/python
                                                SGLang loads what vLLM has computed, and both their own KV
  lmkv demo --engines sglang,sglang             two SGLang engines of this Python environment

Each prompt is measured three times: computed by engine 1 (cold), loaded by engine 2 from engine 1's node (from peer),
and loaded by engine 1 from its own node (own host pool). In float32 the three answers are the same, token by token.
SGLang and vLLM share KV by share_across_engines and hash_scheme (docs/guides/across-engines.md); the demo sets both.
""",
)
def demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines",
        default="vllm,vllm",
        metavar="KIND,KIND",
        help="kinds of engine 1 and engine 2, each vllm or sglang (vllm,vllm)",
    )
    parser.add_argument(
        "--sglang-python",
        metavar="PATH",
        help="Python interpreter of an environment with SGLang and lmkv (that of this command)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--model-size", choices=("mid", "tiny"), default="mid", help="size of the model (mid)")
    parser.add_argument("--prompt-tokens", type=int, default=4000, metavar="N", help="length of each prompt (4000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="prompts to measure (3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model and the prompts (0)")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep the logs of all processes in this folder")


@subcommand(
    run="lmkv_client.demo.bench:run",
    examples="""\
  lmkv bench --url http://10.0.0.7:8000                                  one engine
  lmkv bench --url http://10.0.0.7:8000 --url http://10.0.0.8:8000       repeated prompts go to the other engine
  lmkv bench --url http://proxy:9100 --chats 0 --document-tokens 10000   long documents only, through the proxy

Documents are sent twice, with another question; turns of a chat repeat the turns before them. The table compares the
first time with the others: tokens that were cached, by whom, and the time to the first token. Endpoints are called with
the token in $OPENAI_API_KEY, if it is set. Nothing but requests is sent; the fleet serves others meanwhile.
""",
)
def bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="an engine or proxy; may be repeated: a repeated prompt goes to the next one (http://127.0.0.1:8000)",
    )
    parser.add_argument("--model", metavar="NAME", help="the served model (default: the first one of the first URL)")
    parser.add_argument("--documents", type=int, default=10, metavar="N", help="documents; 0: none (10)")
    parser.add_argument(
        "--document-tokens",
        type=int,
        default=4000,
        metavar="N",
        help="tokens of a document, and of a chat (4000)",
    )
    parser.add_argument("--chats", type=int, default=5, metavar="N", help="chats; 0: none (5)")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="turns of each chat (4)")
    parser.add_argument("--output-tokens", type=int, default=16, metavar="N", help="tokens of each answer (16)")
    parser.add_argument("--in-flight", type=int, default=4, metavar="N", help="requests at a time (4)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the texts (default: new texts in each run)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


@subcommand(
    run="lmkv_client.demo.audit:run",
    examples="""\
  lmkv audit --url http://10.0.0.7:8000 --file prompt.txt       all chunks of a prompt that the engine's node holds
  lmkv audit --url http://10.0.0.7:8000 --prompt "Hi" --json
  lmkv audit --node /run/lmkv/lmkv-1 --time 10m                 every hit of the node's engines for ten minutes
  lmkv audit --node /run/lmkv/lmkv-1 --chunks 500               until 500 chunks are compared, or a minute has passed

An engine computes what it could load, and compares both, as it does with a few hits by itself
(docs/concepts/audit.md). A prompt is computed once, and once more if a chunk differs. A node has no prompts, so its
engines audit hits as requests arrive, each for one chunk of prefill; run it on the node's host, as its user. Wrong
chunks are dropped at all instances.

exit codes:
  0  all that was compared matches    1  a chunk is wrong or suspect, or the call failed    2  bad usage
  3  nothing was compared           130  interrupted: the results so far are printed, and no more hits are audited""",
)
def audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="an engine that holds the prompt; not a proxy")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--file", metavar="FILE", help="file with the prompt's text; -: standard input")
    prompt.add_argument(
        "--tokens-file", metavar="FILE", help="file with its token ids as a JSON list; -: standard input"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the served model or adapter (default: the first one of the URL)"
    )
    parser.add_argument("--cache-salt", metavar="SALT", default="", help="cache salt of the prompt")
    parser.add_argument("--node", metavar="PATH", help="folder or engine.sock of a node on this host: all its hits")
    parser.add_argument(
        "--time", metavar="TIME", type=read_seconds, default=60.0, help="with --node: how long, at most an hour (1m)"
    )
    parser.add_argument(
        "--chunks", metavar="N", type=int, default=0, help="with --node: end after N comparisons; 0: any number (0)"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
