"""Lookups of prompts in the pool and in the tiers behind it, and why chunks are missed."""

from __future__ import annotations
