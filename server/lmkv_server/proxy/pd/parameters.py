"""How a request goes through two engines, and what each of them is asked. No IO.

Continue: the prefill engine's first token goes to the client, and the decode engine goes on behind it. Nothing is
generated twice. Only a request whose later tokens depend on its prompt and its earlier tokens alone can go this way,
whether the earlier ones count as prompt or as answer.

Repeat: the prefill engine only computes the prompt's KV cache, and the decode engine generates all of the answer.

Alone: one engine does everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

CONTINUE, REPEAT, ALONE = "continue", "repeat", "alone"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COMPLETION_TOKENS = 16
"""What `max_tokens` of a completion is unless it says so; a chat has no such limit."""


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


_ALIKE: Final = _words(
    # what decides on each token by itself
    "model temperature top_p top_k min_p logit_bias allowed_token_ids stop_token_ids ignore_eos",
    "include_stop_str_in_output skip_special_tokens max_tokens max_completion_tokens min_tokens",
    # what makes the prompt, whose tokens the prefill engine tells
    "prompt messages add_special_tokens truncate_prompt_tokens truncation_side chat_template chat_template_kwargs",
    "add_generation_prompt continue_final_message documents cache_salt",
    # how the answer is sent
    "stream stream_options stream_interval return_token_ids",
    # what no token depends on
    "user session_id request_id priority metadata store service_tier parallel_tool_calls",
)
"""Parameters that mean the same to both engines."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "bad_words": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logprobs": (False,),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop": ("", []),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Values with which further parameters ask for nothing."""
REASONS: Final = _NEUTRAL.keys() | _words(
    "seed messages max_tokens min_tokens stream_options structured_outputs reasoning_effort thinking_token_budget",
    "repetition_detection prompt_logprobs logprob_token_ids vllm_xargs first_token",
)
"""Reasons to repeat that are told apart in metrics: clients can think of more."""
_FOR_DECODE_ONLY: Final = _words(
    "stream_options stream_interval n best_of use_beam_search echo logprobs top_logprobs prompt_logprobs",
    "logprob_token_ids",
)
"""Parameters that a prompt's KV cache does not depend on, and that would make it dearer."""
_FOR_PREFILL_ONLY: Final = _words("add_special_tokens truncate_prompt_tokens truncation_side")
"""Parameters that have done their work when the prompt's tokens are known."""


def is_alone(body: Mapping[str, Any]) -> bool:
    """Whether a request is for one engine alone.

    It has several prompts, or one that is not made of tokens; or its engine loads no KV cache for it: beam search makes
    requests of its own, and log probabilities of the prompt make engines compute all of it.
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)
    if several or body.get("prompt_embeds") is not None or body.get("use_beam_search"):
        return True
    logprobs = body.get("logprobs")
    of_prompt = body.get("echo") and logprobs is not None and logprobs is not False
    return bool(of_prompt) or body.get("prompt_logprobs") is not None


def why_repeat(body: Mapping[str, Any], path: str) -> str:
    """The parameter for which a request cannot continue in another engine; empty if it can.

    What is not known to be harmless cannot.
    """
    for name, value in body.items():
        if value is None or name in _ALIKE or _asks_for_nothing(name, value):
            continue
        if name == "seed" and body.get("temperature") == 0:
            continue  # nothing is drawn
        return name
    if _has_media(body.get("messages")):
        return "messages"
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.get("continuous_usage_stats"):
        return "stream_options"
    limit = token_limit(body, path)
    if not (_is_count(limit, 1) or (limit is None and path == CHAT)):
        return "max_tokens"
    return "" if _is_count(body.get("min_tokens") or 0, 0) else "min_tokens"


def token_limit(body: Mapping[str, Any], path: str) -> Any:
    """Most tokens of the answer, as the request says it; None if it does not."""
    if path == COMPLETIONS:
        return body.get("max_tokens", COMPLETION_TOKENS)
    limit = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit


def prefill_body(body: Mapping[str, Any], hand_over: Mapping[str, Any] | None, *, with_tokens: bool) -> dict[str, Any]:
    """What the prefill engine is asked: one token, and to hand its KV cache over."""
    asked = {name: value for name, value in body.items() if name not in _FOR_DECODE_ONLY}
    asked |= {"max_tokens": 1, "stream": False}
    if asked.get("max_completion_tokens") is not None:
        asked["max_completion_tokens"] = 1
    if _is_count(asked.get("min_tokens"), 1):
        asked["min_tokens"] = 1
    if with_tokens:
        asked["return_token_ids"] = True
    return with_hand_over(asked, hand_over)


def decode_body(
    body: Mapping[str, Any],
    path: str,
    prompt: Sequence[int],
    taken: Sequence[int],
    hand_over: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What a decode engine is asked that goes on behind the tokens that the client has already."""
    asked = {name: value for name, value in body.items() if name not in _FOR_PREFILL_ONLY}
    tokens = [*prompt, *taken]
    if path == COMPLETIONS:
        asked["prompt"] = tokens
        asked.setdefault("max_tokens", COMPLETION_TOKENS)
    for name in ("max_tokens", "max_completion_tokens"):
        if _is_count(asked.get(name), 1):
            asked[name] -= len(taken)
    if asked.get("min_tokens"):
        asked["min_tokens"] = max(asked["min_tokens"] - len(taken), 0)
    asked["return_token_ids"] = True
    asked = with_hand_over(asked, hand_over)
    if path == CHAT:  # which has no other place for tokens
        asked["kv_transfer_params"] = (asked.get("kv_transfer_params") or {}) | {"prompt_token_ids": tokens}
    return asked


def with_hand_over(body: Mapping[str, Any], hand_over: Mapping[str, Any] | None) -> dict[str, Any]:
    """The request with lmkv's part of its `kv_transfer_params`."""
    parameters = body.get("kv_transfer_params") or {}
    if hand_over is None or not isinstance(parameters, dict):  # of the latter the engine has something to say
        return dict(body)
    return {**body, "kv_transfer_params": {**parameters, "lmkv": dict(hand_over)}}


def without_hand_over(body: Mapping[str, Any]) -> dict[str, Any]:
    """A message without lmkv's part of its `kv_transfer_params`: clients steer no hand-overs, and see none."""
    parameters = body.get("kv_transfer_params")
    if not isinstance(parameters, dict) or "lmkv" not in parameters:
        return dict(body)
    rest = {name: value for name, value in parameters.items() if name != "lmkv"}
    return {**body, "kv_transfer_params": rest or None}


def _asks_for_nothing(name: str, value: object) -> bool:
    is_flag = isinstance(value, bool)  # logprobs 0 asks for some, and is equal to False
    return any(value == neutral and isinstance(neutral, bool) == is_flag for neutral in _NEUTRAL.get(name, ()))


def _has_media(messages: object) -> bool:
    """Whether a message has more than text: it is not in the tokens alone."""
    contents = (
        [message.get("content") for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
