"""An engine that tests make: it speaks vLLM's API over a real socket, but its tokens follow a rule.

A token is a byte of UTF-8. Which one comes next depends on all before it, as in a model that draws nothing, so that it
does not matter which of them were prompt. Only with a `presence_penalty` it does.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmkv.auth.credentials import Credentials
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv_server.http.server import HttpOptions, HttpServer

MODEL = "scripted"
MAX_MODEL_LEN = 1024
EOS = 256
ABORT = 257
_IDS = itertools.count(1)

Json = dict[str, Any]


class Died(Exception):
    """The script of the engine closes the connection."""


class ScriptedEngine:
    """Serves from `start` to `stop`. Records requests in `asked`; faults are set in advance."""

    def __init__(self, instance_id: str = "", credentials: Credentials = PLAINTEXT) -> None:
        self.asked: list[tuple[str, Json, dict[str, str]]] = []
        """Path, body and headers of each request for tokens, probes left out."""
        self.ended: list[Json] = []
        """Handoffs that the proxy has reported as not needed."""
        self.url = ""
        self.port = 0
        self.health = 200
        """What it says of its health; 0: nothing."""
        self.health_count = 0
        self.handoff_params = {"instance_id": instance_id} if instance_id else None
        self.refusals: list[int] = []
        """Statuses that the next requests are answered with."""
        self.die_after: int | None = None
        """Tokens of an answer after which it breaks the connection; once."""
        self.abort_after: int | None = None
        """Tokens of an answer after which it gives up, as an engine does that shuts down; once."""
        self.error_after: int | None = None
        """Tokens of a stream after which it sends an error; once."""
        self.going = asyncio.Event()
        """Cleared, it holds answers back."""
        self.going.set()
        self.hold_after = 0
        """Tokens of a stream that come even while it holds back."""
        self.waiting_count = 0
        """Requests that are held back."""
        self.cut_count = 0
        """Requests whose asker went away."""
        self.tokenize_count = 0
        self.other_paths: tuple[str, ...] = ()
        """Paths beside completions that it serves; set before it starts."""
        self.model = MODEL
        """The model of these paths, and the first one that it lists."""
        self.max_model_len: object = MAX_MODEL_LEN
        """What its list of models says of it."""
        self.cached_tokens: int | None = None
        """Tokens of each prompt that it reports as cached; None: without `--enable-prompt-tokens-details`."""
        self.metrics = ""
        """What it exposes at `/metrics`."""
        self.thinks = False
        """Whether it has a parser that takes what it says in chats for reasoning."""
        self.api_key = ""
        self._credentials = credentials
        self._http: HttpServer | None = None

    async def start(self) -> None:
        """Begins to serve, at the same port if it has served before."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/metrics", self._metrics),
                *(Route(path, self._other, methods=["GET", "POST"]) for path in self.other_paths),
            ]
        )
        self._http = HttpServer(app, HttpOptions(host="127.0.0.1", port=self.port, credentials=self._credentials))
        self.port = self._http.port
        self.url = f"{'https' if self._credentials.cert else 'http'}://127.0.0.1:{self.port}"
        await self._http.start()

    async def stop(self) -> None:
        """Dies: connections break, and its port is closed."""
        self.going.set()
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def bodies(self) -> list[Json]:
        return [body for _, body, _ in self.asked]

    async def _health(self, request: Request) -> Response:
        self.health_count += 1
        if self.health == 0:
            await request.receive()
            await request.receive()
        return Response(status_code=self.health or 500)

    async def _models(self, request: Request) -> Response:
        if self._is_stranger(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        card = {"id": self.model, "object": "model", "parent": None, "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [card, {"id": "tuned", "parent": MODEL}]})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics)

    async def _other(self, request: Request) -> Response:
        """A path beside completions. The response names it; it is a stream of events if the request asks for one."""
        body = await request.json() if request.method == "POST" else {}
        self.asked.append((request.url.path, body, dict(request.headers)))
        if self.refusals:
            return _error(self.refusals.pop(0), "as scripted")
        if body.get("model", self.model) != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if not self.going.is_set():
            self.waiting_count += 1
            await self._hold(request)
        answer = {"path": request.url.path, "model": self.model}
        return _Streamed(self._parts(answer)) if body.get("stream") else JSONResponse(answer)

    async def _parts(self, answer: Json) -> AsyncIterator[bytes]:
        for index, name in enumerate(("response.created", "response.output_text.delta", "response.completed")):
            if self.die_after == index:
                self.die_after = None
                raise Died
            yield f"event: {name}\n".encode() + _event(answer)

    async def _tokenize(self, request: Request) -> Response:
        self.tokenize_count += 1
        tokens = tokens_of(await request.json())
        return JSONResponse({"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens})

    def _is_stranger(self, request: Request) -> bool:
        return bool(self.api_key) and request.headers.get("authorization") != f"Bearer {self.api_key}"

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if self._is_stranger(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        if body.get("prompt") == [1] and body.get("kv_transfer_params") == {"lmkv": {}}:
            return JSONResponse(self._whole(body, request.url.path, await self._run(body, request)))
        handoff = (body.get("kv_transfer_params") or {}).get("lmkv") or {}
        if handoff.get("prompt_token_count") == 0:
            self.ended.append(handoff)
            return JSONResponse(self._whole(body, request.url.path, await self._run(body, request)))
        self.asked.append((request.url.path, body, dict(request.headers)))
        if self.refusals:
            return _error(self.refusals.pop(0), "as scripted")
        if body.get("model") not in (MODEL, "tuned", self.model):
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        prompt = tokens_of(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if len(prompt) + (limit or 1) > MAX_MODEL_LEN:
            return _error(400, "This model's maximum context length is exceeded.")
        if not body.get("stream") and body.get("stream_options"):
            return _error(400, "Stream options can only be defined when `stream=True`.")
        if body.get("min_tokens", 0) > (limit or MAX_MODEL_LEN):
            return _error(400, "min_tokens must be at most max_tokens")
        if not body.get("stream"):
            return JSONResponse(self._whole(body, request.url.path, await self._run(body, request)))
        return _Streamed(self._events(body, request))

    async def _run(self, body: Json, request: Request) -> list[int]:
        return [token async for token in self._tokens(body, request)]

    async def _tokens(self, body: Json, request: Request) -> AsyncIterator[int]:
        """The answer's tokens. Waits while it is held back, and sees whether its asker goes."""
        prompt = tokens_of(body)
        answer = answer_to(prompt, body)
        for index, token in enumerate(answer):
            if not self.going.is_set() and index >= self.hold_after:
                self.waiting_count += 1
                await self._hold(request)
            if self.die_after is not None and index >= self.die_after:
                self.die_after = None
                raise Died
            if self.abort_after is not None and index >= self.abort_after:
                self.abort_after = None
                yield ABORT
                return
            await asyncio.sleep(0)
            yield token

    async def _hold(self, request: Request) -> None:
        going = asyncio.create_task(self.going.wait())
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({going, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.cut_count += 1
                raise Died
        finally:
            going.cancel()
            gone.cancel()
            await asyncio.gather(going, gone, return_exceptions=True)

    def _whole(self, body: Json, path: str, tokens: Sequence[int]) -> Json:
        prompt = tokens_of(body)
        finish = _finish_reason(tokens, body, len(prompt))
        text = "".join(texts_of(prompt, tokens))
        ids = list(tokens) if body.get("return_token_ids") else None
        answer: Json = {**_head(path, body), "choices": []}
        prompt_ids = prompt if body.get("return_token_ids") else None
        if "chat" in path:
            message: Json = {"role": "assistant", "content": text, "reasoning": None, "tool_calls": []}
            if self.thinks:
                message |= {"content": None, "reasoning": text}
            choice: Json = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
            choice |= {"stop_reason": None, "token_ids": ids}
        else:
            choice = {"index": 0, "text": text, "logprobs": _logprobs(tokens, body), "finish_reason": finish}
            choice |= {"stop_reason": None, "token_ids": ids, "prompt_token_ids": prompt_ids}
        answer["choices"] = [choice]
        answer["usage"] = self._usage(len(prompt), len(tokens))
        if "chat" in path:
            answer["prompt_token_ids"] = prompt_ids
        asked = (body.get("kv_transfer_params") or {}).get("lmkv")
        answer["kv_transfer_params"] = (
            {"lmkv": self.handoff_params} if asked is not None and self.handoff_params else None
        )
        return answer

    def _usage(self, prompt_count: int, count: int) -> Json:
        counts = {"prompt_tokens": prompt_count, "total_tokens": prompt_count + count, "completion_tokens": count}
        details = {"cached_tokens": self.cached_tokens}
        return counts if self.cached_tokens is None else {**counts, "prompt_tokens_details": details}

    async def _events(self, body: Json, request: Request) -> AsyncIterator[bytes]:
        path = request.url.path
        is_chat = "chat" in path
        prompt = tokens_of(body)
        head = _head(path, body)
        wants_ids = bool(body.get("return_token_ids"))
        tokens: list[int] = []
        async for token in self._tokens(body, request):
            if self.error_after is not None and len(tokens) >= self.error_after:
                self.error_after = None
                yield _event({"error": {"message": "as scripted", "type": "InternalServerError", "code": 500}})
                yield b"data: [DONE]\n\n"
                return
            tokens.append(token)
            if is_chat and len(tokens) == 1:
                choice: Json = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                choice["finish_reason"] = None
                ids = prompt if wants_ids else None
                yield _event({**head, "choices": [choice], "prompt_token_ids": ids, "prompt_text": None})
            text = texts_of(prompt, tokens)[-1]
            finish = _finish_reason(tokens, body, len(prompt))
            ids = [token] if wants_ids else None
            if is_chat:
                choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
                choice |= ({"stop_reason": None} if finish else {}) | {"token_ids": ids}
            else:
                choice = {"index": 0, "text": text, "logprobs": _logprobs([token], body), "finish_reason": finish}
                choice["stop_reason"] = None
                choice["prompt_token_ids"] = prompt if wants_ids and len(tokens) == 1 else None
                choice["token_ids"] = ids
            yield _event({**head, "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _event({**head, "choices": [], "usage": self._usage(len(prompt), len(tokens))})
        yield b"data: [DONE]\n\n"


class _Streamed(Response):
    """A stream that breaks where its events do: what raises is the connection's end, not an error on the log."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        first = True
        async for event in self._events:
            if first:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                first = False
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def tokens_of(body: Json) -> list[int]:
    """The prompt's tokens: a chat's are those of a simple template."""
    forwarded = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if forwarded is not None:
        return list(forwarded)
    if "messages" in body:
        effort = body.get("reasoning_effort") or (body.get("chat_template_kwargs") or {}).get("reasoning_effort") or ""
        text = "".join(f"{message['role']}: {message['content']}\n" for message in body["messages"])
        return _cut(list(f"{effort}{text}assistant: ".encode()), body)
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    tokens = list(prompt.encode()) if isinstance(prompt, str) else list(itertools.chain(prompt))
    if tokens and not isinstance(tokens[0], int):  # several prompts: the first will do
        tokens = list(tokens[0].encode())
    return _cut(tokens, body)


def _cut(tokens: list[int], body: Json) -> list[int]:
    count = body.get("truncate_prompt_tokens")
    if not count:
        return tokens
    return tokens[:count] if body.get("truncation_side") == "right" else tokens[-count:]


def answer_to(prompt: Sequence[int], body: Json) -> list[int]:
    """All tokens of the answer."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is None:
        limit = MAX_MODEL_LEN if "messages" in body else 16
    tokens = list(prompt)
    answer: list[int] = []
    while len(answer) < limit and len(tokens) < MAX_MODEL_LEN:
        salt = len(answer) if body.get("presence_penalty") else 0
        may_end = len(answer) >= body.get("min_tokens", 0) and not body.get("ignore_eos")
        token = next_token(tokens, salt, may_end=may_end)
        tokens.append(token)
        answer.append(token)
        if token == EOS:
            break
    return answer


def next_token(tokens: Sequence[int], salt: int = 0, *, may_end: bool = True) -> int:
    """What follows: mostly a letter, at times two bytes of one, at times the end."""
    if tokens[-1] == 0xC3:
        return 0xA9  # é
    drawn = int.from_bytes(hashlib.sha256(json.dumps([list(tokens), salt]).encode()).digest()[:4], "little")
    if may_end and drawn % 41 == 0:
        return EOS
    return 0xC3 if drawn % 4 == 0 else ord("a") + drawn % 26


def texts_of(prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text of each token, as vLLM streams it: nothing until a character is complete.

    After a prompt that ends within a character, the first text is the whole prompt's once more, as there.
    """
    known = bytes(token for token in prompt if token < EOS)
    shown = known.decode(errors="replace")
    shown = "" if shown.endswith("\N{REPLACEMENT CHARACTER}") else shown
    texts = []
    for token in tokens:
        known += bytes([token]) if token < EOS else b""
        text = known.decode(errors="replace")
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            texts.append("")
        else:
            texts.append(text[len(shown) :])
            shown = text
    return texts


def _finish_reason(tokens: Sequence[int], body: Json, prompt_count: int) -> str | None:
    if tokens[-1] >= EOS:
        return "stop" if tokens[-1] == EOS else "abort"
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is None and "messages" not in body:
        limit = 16
    return "length" if len(tokens) == limit or prompt_count + len(tokens) >= MAX_MODEL_LEN else None


def _head(path: str, body: Json) -> Json:
    kind = "chat.completion" if "chat" in path else "text_completion"
    if "chat" in path and body.get("stream"):
        kind += ".chunk"
    number = next(_IDS)
    prefix = "chatcmpl" if "chat" in path else "cmpl"
    return {"id": f"{prefix}-{number}", "object": kind, "created": 1_700_000_000 + number, "model": body["model"]}


def _logprobs(tokens: Sequence[int], body: Json) -> Json | None:
    return None if body.get("logprobs") is None else {"token_logprobs": [-0.5] * len(tokens)}


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
