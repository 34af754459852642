"""Request bodies of LMCache's HTTP paths."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lmkv.rpc.prompts import by_tokens
from lmkv.v1.prompt_pb2 import PromptSelector
from lmkv_server.coordinator.http.paths import Body
from lmkv_server.coordinator.http.tokens import token_array

TokenIds = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0}})
]
"""Not decoded here: `token_array` reads the text."""


class Prompt(Body):
    """Names a prompt's chunks; `tokens` suffices in a fleet with one model."""

    tokens: TokenIds = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))
    model_name: str = ""
    cache_salt: str = ""
    lora_name: str = ""

    @property
    def selector(self) -> PromptSelector:
        """What requests of RPCs name the chunks by."""
        return by_tokens(
            token_array(self.tokens).tolist(),
            model_name=self.model_name,
            cache_salt=self.cache_salt,
            lora_name=self.lora_name,
        )


class LookupBody(Prompt, kw_only=True):
    """Body of `/lookup`."""

    tokens: TokenIds


class MoveBody(Prompt, kw_only=True):
    """Body of `/move`. A position is `[instance_id, location]`. LMCache's code has `should_copy`, its manual `copy`."""

    old_position: tuple[str, str]
    new_position: tuple[str, str]
    copy: bool | None = None
    should_copy: bool | None = None
    request_id: str = ""


class ClearBody(Prompt, kw_only=True):
    """Body of `/clear`. Without a location all tiers are cleared, without tokens all chunks."""

    instance_id: str
    location: str = ""


class PinBody(Prompt, kw_only=True):
    """Body of `/pin`. `ttl` is in seconds."""

    instance_id: str
    location: str = "LocalCPUBackend"
    ttl: float | None = None


class UnpinBody(Body):
    """Body of `/unpin`: the `event_id` that `/pin` answered."""

    event_id: str = ""
    pin_id: str = ""


class EventBody(Body):
    """Body of `/check_finish`."""

    event_id: str


class InstanceBody(Body):
    """Body of `/health`."""

    instance_id: str


class AddressBody(Body):
    """Body of `/query_instance`; an `event_id` is echoed."""

    ip: str
    event_id: str = ""


class WorkersBody(Body):
    """Body of `/query_worker_info`; `all` stands for every instance."""

    instance_id: str = "all"
    worker_ids: list[int] | None = None
