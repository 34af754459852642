"""`python -m lmkv`: the console script `lmkv`."""

from __future__ import annotations

import sys

from lmkv.cli import main

sys.exit(main())
