"""A client of an OpenAI API, of an engine or the proxy: for the demo, the tests and the benchmarks."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lmkv.errors import LmkvError, Unreachable

REQUEST_TIMEOUT_SECONDS = 300.0


class Endpoint:
    """A synchronous client of one server. Thread-safe: each request has its own connection."""

    def __init__(
        self,
        name: str,
        port: int,
        model_name: str,
        host: str = "127.0.0.1",
        *,
        tls: ssl.SSLContext | None = None,
        token: str = "",
    ) -> None:
        """`tls` is for HTTPS; None: plain HTTP. `token` is shown with each request."""
        self.name = name
        self.host = host
        self.port = port
        self.model_name = model_name
        self._tls = tls
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        """Sent with each request."""

    def complete(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 16,
        *,
        stream: bool = True,
        logprobs: bool = False,
        extra: Mapping[str, object] | None = None,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Completion:
        """Completes a prompt greedily with exactly `max_tokens` tokens.

        `extra` goes into the request's body (`cache_salt`, `kv_transfer_params`, ...). Without `stream` the time to
        the first token is the total time. Raises `Unreachable` if the engine is gone or does not answer in time,
        `LmkvError` if it refuses the request.
        """
        body = self._body(prompt, max_tokens, logprobs, extra)
        return self._complete_stream(body, timeout_seconds) if stream else self._complete_whole(body, timeout_seconds)

    def answer(self, prompt: Sequence[int] | str, max_tokens: int, **extra: object) -> dict[str, Any]:
        """The response to a completion request that is not streamed, as JSON. Raises as `complete`."""
        body = self._body(prompt, max_tokens, False, extra)
        answer: dict[str, Any] = json.loads(self._request("POST", "/v1/completions", body, REQUEST_TIMEOUT_SECONDS))
        return answer

    def chat(self, **body: object) -> str:
        """The text of a chat completion with these parameters. Raises as `complete`."""
        body = {"model": self.model_name, "temperature": 0, "ignore_eos": True} | body
        answer = json.loads(self._request("POST", "/v1/chat/completions", body, REQUEST_TIMEOUT_SECONDS))
        return str(answer["choices"][0]["message"]["content"])

    def stream(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 16,
        *,
        extra: Mapping[str, object] | None = None,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Generator[CompletionToken, None, None]:
        """Yields the tokens of a completion as they arrive. Sends the request when the first token is requested.

        Closing the iterator closes the connection, and the engine aborts the request. Raises as `complete`.
        """
        for event, seconds in self._events(self._body(prompt, max_tokens, False, extra), timeout_seconds):
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    yield read_token(choice, seconds)

    def metrics(self, **labels: str) -> dict[str, float]:
        """Current values at /metrics by sample name, summed over all samples with these labels.

        Samples with the label `tier` are also summed by tier, under `NAME{tier="TIER"}`.
        """
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self._request("GET", "/metrics", timeout_seconds=60.0).decode()):
            for sample in family.samples:
                if labels.items() <= sample.labels.items():
                    tier = sample.labels.get("tier")
                    for name in (sample.name, f'{sample.name}{{tier="{tier}"}}') if tier else (sample.name,):
                        values[name] = values.get(name, 0.0) + sample.value
        return values

    def models(self) -> list[str]:
        """The names of the models that it serves. Raises as `complete`."""
        return [str(one["id"]) for one in json.loads(self._request("GET", "/v1/models"))["data"]]

    def answers(self, path: str) -> bool:
        """Whether a GET of this path returns 200."""
        try:
            self._request("GET", path, timeout_seconds=2.0)
        except LmkvError:
            return False
        return True

    def _body(
        self, prompt: Sequence[int] | str, max_tokens: int, logprobs: bool, extra: Mapping[str, object] | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model_name,
            "prompt": prompt if isinstance(prompt, str) else [int(token) for token in prompt],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if logprobs:
            body["logprobs"] = 0  # only those of the chosen tokens
        return body | dict(extra or {})

    def _complete_whole(self, body: dict[str, Any], timeout_seconds: float) -> Completion:
        begin = time.perf_counter()
        answer = json.loads(self._request("POST", "/v1/completions", body, timeout_seconds))
        seconds = time.perf_counter() - begin
        choice = answer["choices"][0]
        return make_completion([read_token(choice, seconds)], choice, answer["usage"], seconds)

    def _complete_stream(self, body: dict[str, Any], timeout_seconds: float) -> Completion:
        begin = time.perf_counter()
        tokens: list[CompletionToken] = []
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        for event, seconds in self._events(body, timeout_seconds):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                last = choice
                if choice.get("token_ids") or ("token_ids" not in choice and choice.get("text")):  # not vLLM's
                    tokens.append(read_token(choice, seconds))
        return make_completion(tokens, last, usage, time.perf_counter() - begin)

    def _events(self, body: dict[str, Any], timeout_seconds: float) -> Iterator[tuple[dict[str, Any], float]]:
        """Events of a streamed completion, with seconds since the request was sent."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        connection = self._connection(timeout_seconds)
        begin = time.perf_counter()
        finished = False
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refused("/v1/completions", response.status, response.read())
            for line in response:
                seconds = time.perf_counter() - begin
                if line.startswith(b"data: [DONE]"):
                    finished = True
                elif line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise self._refused("/v1/completions", 200, line)
                    yield event, seconds
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.name} did not respond: {error!r}", address=f"{self.host}:{self.port}") from error
        finally:
            connection.close()
        if not finished:
            raise Unreachable(f"{self.name} ended its response early", address=f"{self.host}:{self.port}")

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None, timeout_seconds: float = 30.0
    ) -> bytes:
        connection = self._connection(timeout_seconds)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self.headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.name} did not respond: {error!r}", address=f"{self.host}:{self.port}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise self._refused(path, response.status, answer)
        return answer

    def _connection(self, timeout_seconds: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_seconds)
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_seconds, context=self._tls)

    def _refused(self, path: str, status: int, answer: bytes) -> LmkvError:
        return LmkvError(
            f"{self.name} rejected {path} with HTTP {status}: {answer.decode(errors='replace').strip()}", status=status
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionToken:
    """One event of a streamed completion."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float
    """Time since the request was sent."""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The completion of one prompt."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """`length`, `stop`, or `error` for a request that the engine aborted."""
    ttft_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine did not compute: from its prefix cache or from lmkv."""
    logprobs: tuple[float, ...] = ()
    """Log probability of each token, if the request has `logprobs`."""
    gaps: tuple[float, ...] = ()
    """Seconds between the events of a stream that brought tokens."""


def read_token(choice: Mapping[str, Any], seconds: float) -> CompletionToken:
    """The tokens in one choice of a response or an event."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return CompletionToken(
        token_ids=tuple(choice.get("token_ids") or ()), text=choice["text"], seconds=seconds, logprobs=tuple(logprobs)
    )


def make_completion(
    tokens: Sequence[CompletionToken], last: Mapping[str, Any], usage: Mapping[str, Any], total_seconds: float
) -> Completion:
    """Combines streamed tokens, the last choice and the usage."""
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        token_ids=tuple(token_id for token in tokens for token_id in token.token_ids),
        text="".join(token.text for token in tokens),
        finish_reason=last.get("finish_reason") or "",
        ttft_seconds=tokens[0].seconds if tokens else total_seconds,
        total_seconds=total_seconds,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        logprobs=tuple(value for token in tokens for value in token.logprobs),
        gaps=tuple(later.seconds - token.seconds for token, later in pairwise(tokens)),
    )
