"""Logs say who has sent a signal."""

from __future__ import annotations

import os

from lmkv.runtime.signals import SI_KERNEL, describe_sender


def test_the_sender_of_a_signal_is_described() -> None:
    assert describe_sender(SI_KERNEL, 0, 0) == "the terminal or the kernel"
    assert describe_sender(0, 0, 0) == "a process outside this container"
    assert describe_sender(0, os.getpid(), 7).startswith(f"process {os.getpid()} (")
