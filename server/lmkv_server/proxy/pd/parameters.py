"""The ways in which two engines share a request, and the parameters of the request to each of them. Pure.

Continue: the client receives the prefill engine's first token, and the decode engine continues after it. No token is
generated twice. Requires that each token depends only on the tokens before it, whether they count as prompt or as
completion.

Repeat: the prefill engine only computes the KV cache of the prompt, and the decode engine generates the response.

Alone: one engine serves the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmkv_server.http.json_text import LongValue
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, DEFAULT_COMPLETION_TOKENS, Json

HINTS = "kv_hints"
"""The field of `kv_transfer_params["lmkv"]` that belongs to clients."""
CONTINUE, REPEAT, ALONE = "continue", "repeat", "alone"


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


_COMMON: Final = _words(
    # sampling of one token
    "model temperature top_p top_k min_p logit_bias allowed_token_ids stop_token_ids ignore_eos",
    "include_stop_str_in_output skip_special_tokens max_tokens max_completion_tokens min_tokens",
    # the prompt, whose tokens the prefill engine returns
    "prompt messages add_special_tokens truncate_prompt_tokens truncation_side chat_template chat_template_kwargs",
    "add_generation_prompt continue_final_message documents cache_salt",
    # the form of the response
    "stream stream_options stream_interval return_token_ids",
    # without effect on tokens
    "user session_id request_id priority metadata store service_tier parallel_tool_calls",
)
"""Parameters with the same meaning for both engines."""
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
"""Values with which other parameters have no effect."""
REASONS: Final = _NEUTRAL.keys() | _words(
    "seed messages max_tokens min_tokens stream_options structured_outputs reasoning_effort thinking_token_budget",
    "repetition_detection prompt_logprobs logprob_token_ids vllm_xargs first_token",
)
"""Reasons to repeat that are metric labels. Any other parameter counts as `OTHER`, since clients choose its name."""
OTHER: Final = "other"
_FOR_DECODE_ONLY: Final = _words(
    "stream_options stream_interval n best_of use_beam_search echo logprobs top_logprobs prompt_logprobs",
    "logprob_token_ids",
)
"""Parameters that do not affect the KV cache of the prompt and would make the prefill more expensive."""
_FOR_PREFILL_ONLY: Final = _words("add_special_tokens truncate_prompt_tokens truncation_side")
"""Parameters that apply only until the prompt is tokenized."""


def needs_one_engine(body: Mapping[str, Any]) -> bool:
    """Whether the request cannot be shared by two engines.

    True for several prompts and for prompts without tokens. Also if engines load no KV cache for the request: beam
    search creates its own requests, and log probabilities of the prompt require that all of it is computed.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, LongValue):
        several = prompt.is_list and prompt.comma_count > 0 and not prompt.has_only_numbers
    else:
        several = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)
    if several or body.get("prompt_embeds") is not None or body.get("use_beam_search"):
        return True
    logprobs = body.get("logprobs")
    of_prompt = body.get("echo") and logprobs is not None and logprobs is not False
    return bool(of_prompt) or body.get("prompt_logprobs") is not None


def repeat_reason(body: Mapping[str, Any], path: str) -> str:
    """The parameter that prevents continuing in another engine; empty if there is none.

    A parameter that is not known to be safe prevents it.
    """
    for name, value in body.items():
        if value is None or name in _COMMON or _is_neutral(name, value):
            continue
        if name == "kv_transfer_params" and isinstance(value, dict) and value.keys() == {"lmkv"}:
            continue  # hints
        if name == "seed" and body.get("temperature") == 0:
            continue  # greedy sampling uses no seed
        return name or OTHER
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
    """Maximum number of tokens of the response that the request sets; None if it sets none."""
    if path == COMPLETIONS:
        return body.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    limit = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit


def prefill_body(body: Mapping[str, Any], handoff: Mapping[str, Any] | None, *, with_tokens: bool) -> Json:
    """The prefill engine's request: one token, and the handoff of its KV cache. Hints are for the decode engine."""
    parameters = {name: value for name, value in without_hints(body).items() if name not in _FOR_DECODE_ONLY}
    parameters |= {"max_tokens": 1, "stream": False}
    if parameters.get("max_completion_tokens") is not None:
        parameters["max_completion_tokens"] = 1
    if _is_count(parameters.get("min_tokens"), 1):
        parameters["min_tokens"] = 1
    if with_tokens:
        parameters["return_token_ids"] = True
    return with_handoff(parameters, handoff)


def decode_body(
    body: Mapping[str, Any],
    path: str,
    prompt: Sequence[int],
    delivered: Sequence[int],
    handoff: Mapping[str, Any] | None,
) -> Json:
    """The request of a decode engine that continues after the tokens that the client already has."""
    parameters = {name: value for name, value in body.items() if name not in _FOR_PREFILL_ONLY}
    tokens = [*prompt, *delivered]
    if path == COMPLETIONS:
        parameters["prompt"] = tokens
        parameters.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    for name in ("max_tokens", "max_completion_tokens"):
        if _is_count(parameters.get(name), 1):
            parameters[name] -= len(delivered)
    if parameters.get("min_tokens"):
        parameters["min_tokens"] = max(parameters["min_tokens"] - len(delivered), 0)
    parameters["return_token_ids"] = True
    parameters = with_handoff(parameters, handoff)
    if path == CHAT:  # the chat API has no other parameter for tokens
        parameters["kv_transfer_params"] = (parameters.get("kv_transfer_params") or {}) | {"prompt_token_ids": tokens}
    return parameters


def with_handoff(body: Mapping[str, Any], handoff: Mapping[str, Any] | None) -> Json:
    """The request with handoff parameters in its `kv_transfer_params`, beside hints."""
    parameters = body.get("kv_transfer_params") or {}
    if handoff is None or not isinstance(parameters, dict):  # the engine rejects the latter itself
        return dict(body)
    return {**body, "kv_transfer_params": {**parameters, "lmkv": {**_hints(parameters), **handoff}}}


def without_handoff(body: Mapping[str, Any]) -> Json:
    """A request or response without handoff parameters: clients neither set nor receive them. Hints stay."""
    return _reduced(body, keeps_hints=True)


def without_hints(body: Mapping[str, Any]) -> Json:
    """A request without hints and handoff parameters."""
    return _reduced(body, keeps_hints=False)


def _reduced(body: Mapping[str, Any], *, keeps_hints: bool) -> Json:
    parameters = body.get("kv_transfer_params")
    if not isinstance(parameters, dict) or "lmkv" not in parameters:
        return dict(body)
    rest = {name: value for name, value in parameters.items() if name != "lmkv"}
    if keeps_hints and (hints := _hints(parameters)):
        rest["lmkv"] = hints
    return {**body, "kv_transfer_params": rest or None}


def _hints(parameters: Mapping[str, Any]) -> Json:
    """The hints among the parameters; a request that was admitted has nothing else in `lmkv`."""
    own = parameters.get("lmkv")
    return {HINTS: own[HINTS]} if isinstance(own, dict) and HINTS in own else {}


def _is_neutral(name: str, value: object) -> bool:
    is_flag = isinstance(value, bool)  # logprobs=0 has an effect, but equals False
    return any(value == neutral and isinstance(neutral, bool) == is_flag for neutral in _NEUTRAL.get(name, ()))


def _has_media(messages: object) -> bool:
    """Whether a message has content other than text, which the tokens do not contain."""
    contents = (
        [message.get("content") for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def _is_count(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
