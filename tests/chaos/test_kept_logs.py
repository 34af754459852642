"""The logs of a failed run stay, those of another one do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kept_logs import kept_logs


@pytest.mark.parametrize("error", [AssertionError("an operation runs"), pytest.fail.Exception("a rule")])
def test_the_logs_of_a_failed_run_are_copied_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    logs, failures = tmp_path / "logs", tmp_path / "failures"
    (logs / "coordinator-1").mkdir(parents=True)
    (logs / "coordinator-1" / "coordinator.log").write_text("registered")
    with pytest.raises(type(error)) as raised, kept_logs("run-7", "SEED=7", logs, capsys, failures):
        raise error
    (kept,) = failures.iterdir()
    assert kept.name.startswith("run-7-")
    assert (kept / "coordinator-1" / "coordinator.log").read_text() == "registered"
    assert raised.value.__notes__ == [f"SEED=7 failed; its logs are in {kept}"]


def test_a_run_that_passes_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kept_logs("run-7", "SEED=7", tmp_path, capsys, tmp_path / "failures"):
        pass
    assert not (tmp_path / "failures").exists()
