"""`python -m lmkv`: the same as the console script."""

from __future__ import annotations

import sys

from lmkv.cli import main

sys.exit(main())
