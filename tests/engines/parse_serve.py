"""Parses command lines of `vllm serve` as vLLM does: each argument is one, with tabs between its words."""

from __future__ import annotations

import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
for line in sys.argv[1:]:
    parser.parse_args(line.split("\t"))
