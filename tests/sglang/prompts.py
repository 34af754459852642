"""Prompts for SGLang servers, and what is stored of them."""

from __future__ import annotations

import random

from tests.sglang.engine import PAGE_SIZE

PROMPT_TOKENS = 900
STORED_TOKENS = PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE
HIT_TOKENS = (PROMPT_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE
"""Of a prompt that is stored: SGLang computes at least its last token."""
PAGE_COUNT = STORED_TOKENS // PAGE_SIZE
STORE_SECONDS = 60.0
"""Deadline for what an engine has answered to be stored."""


def make_prompt(seed: int, token_count: int = PROMPT_TOKENS) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(2, 500) for _ in range(token_count)]
