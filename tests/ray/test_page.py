"""The programs on the page deploy what the files beside them do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ray.page import Page

PAIRS = {
    "app.py": ("config.yaml", ["llm_configs"]),
    "pd_app.py": ("pd_config.yaml", ["prefill_config", "decode_config"]),
}


def arguments_of(program: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the app that a program builds; nothing is deployed."""
    from ray import serve
    from ray.serve import llm

    built: list[tuple[str, dict[str, Any]]] = []
    for name in ("build_openai_app", "build_pd_openai_app"):
        monkeypatch.setattr(llm, name, lambda arguments, name=name: built.append((name, arguments)))
    monkeypatch.setattr(serve, "run", lambda app: None)
    exec(compile(program, "page", "exec"), {"__name__": "__main__"})
    (one,) = built
    return one


@pytest.mark.filterwarnings("ignore")  # of Ray, and of what it imports
@pytest.mark.parametrize("program", PAIRS)
def test_program_and_file_say_the_same(program: str, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.llm import LLMConfig

    file, keys = PAIRS[program]
    (application,) = page.config(file)["applications"]
    builder, arguments = arguments_of(page.files[program], monkeypatch)
    assert application["import_path"] == f"ray.serve.llm:{builder}"
    assert list(application["args"]) == list(arguments) == keys
    for key in keys:
        written, built = application["args"][key], arguments[key]
        for one, other in zip(
            *((value if isinstance(value, list) else [value]) for value in (written, built)), strict=True
        ):
            assert LLMConfig(**one, runtime_env=application["runtime_env"]) == other
