"""The files of docs/guides/ray-serve.md, and how tests change them: sizes and model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

BLOCK = re.compile(r"^```(python|yaml)\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

SOURCE = "Qwen/Qwen2-0.5B-Instruct"
ENGINE = {
    "dtype": "float32",  # what is loaded and what is computed then say the same, to the last token
    "enforce_eager": True,
    "block_size": 128,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 3072 * 4096,  # little: a prompt is soon evicted by others
    "enable_prompt_tokens_details": True,
}
ON_CPU = {"accelerator_config": {"kind": "cpu"}, "placement_group_config": {"bundles": [{"CPU": 1}]}}
"""What the page says to add without a GPU. Ray adds one processor for the replica itself."""
GIGABYTES = "0.25"


class Page:
    """The files on the page by name, which their first lines contain."""

    def __init__(self, file: Path) -> None:
        self.files = {name: text for _, name, text in BLOCK.findall(file.read_text())}

    def config(self, name: str) -> dict[str, Any]:
        """A file for `serve run`, as it is on the page."""
        config: dict[str, Any] = yaml.safe_load(self.files[name])
        return config

    def small_config(self, name: str, model: Path, port: int, **deployment: object) -> str:
        """The same for this host: a tiny model, on processors, served at `port`."""
        config = self.config(name) | {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
        (application,) = config["applications"]
        application["runtime_env"]["env_vars"]["LMKV_MAX_LOCAL_CPU_SIZE"] = GIGABYTES
        for llm in application["args"]["llm_configs"]:
            llm |= ON_CPU | {"deployment_config": deployment}
            llm["model_loading_config"] |= {"model_source": str(model)}
            llm["engine_kwargs"] |= ENGINE
        return yaml.safe_dump(config)

    def small_program(self, name: str, model: Path, port: int) -> str:
        """A program for this host, changed like `small_config`."""
        text = self.files[name]
        for old, new in {
            repr(SOURCE).replace("'", '"'): repr(str(model)),
            '"tensor_parallel_size": 1,': f'"tensor_parallel_size": 1, **{ENGINE!r},',
            "LLMConfig(\n": f"LLMConfig(**{ON_CPU!r},\n",
            '"LMKV_LOCAL_CPU": "True",': f'"LMKV_LOCAL_CPU": "True", "LMKV_MAX_LOCAL_CPU_SIZE": "{GIGABYTES}",',
        }.items():
            assert old in text, f"{name} has no {old} any more"
            text = text.replace(old, new)
        start = f'serve.start(proxy_location="HeadOnly", http_options={{"host": "127.0.0.1", "port": {port}}})'
        return f"from ray import serve\n{start}\n{text}"
