"""LLM, the engine inside a Python process: what its methods return, how requests end, what is left after `close`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ai_engine import LLM
from ai_engine.ports.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    InvalidValue,
    ModelFileError,
    ModelNotFound,
)
from tests.integration.engines import write_model

PROMPT = [5, 17, 3, 88, 41, 2, 9, 63]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_context=4096, speculation="off") as made:
        yield made


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), max_context=2048) as made:
        yield made


def wait_until_idle(llm: LLM) -> None:
    """Looks at the page pool: nothing is held."""
    deadline = time.monotonic() + 10
    while llm._stack.runtime.budget().held:
        assert time.monotonic() < deadline, llm._stack.runtime.budget()
        time.sleep(0.01)


def test_one_prompt_and_several(llm: LLM) -> None:
    [one] = llm.generate(PROMPT, max_tokens=12, **GREEDY)
    assert (len(one.tokens), one.finish_reason, one.stop_reason, one.logprobs) == (12, "length", None, None)
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (8, 12)
    prompts = [PROMPT[:size] for size in range(1, 9)]
    together = llm.generate(prompts, max_tokens=12, **GREEDY)
    assert [answer.usage.prompt_tokens for answer in together] == list(range(1, 9)), "in the order of the prompts"
    assert together[7].tokens == one.tokens
    assert [llm.generate(prompt, max_tokens=12, **GREEDY)[0].tokens for prompt in prompts] == [
        answer.tokens for answer in together
    ]
    assert llm.generate([], max_tokens=3) == []
    assert llm.generate((5, 17, 3), max_tokens=2, **GREEDY)[0].usage.prompt_tokens == 3


def test_seeds_and_logprobs(llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "ignore_eos": True}
    first, again, other = (
        llm.generate([PROMPT] * 3, **fields, seed=3),
        *(llm.generate(PROMPT, **fields, seed=seed) for seed in (3, 4)),
    )
    assert {tuple(answer.tokens) for answer in [*first, *again]} == {tuple(first[0].tokens)}
    assert other[0].tokens != first[0].tokens
    assert len({tuple(answer.tokens) for answer in llm.generate([PROMPT] * 4, **fields)}) > 1, (
        "no seed: drawn each time"
    )
    [scored] = llm.generate(PROMPT, max_tokens=5, logprobs=2, **GREEDY)
    assert scored.logprobs is not None
    assert [entry.token for entry in scored.logprobs] == scored.tokens
    assert all(entry.top[0] == (entry.token, entry.logprob) and len(entry.top) == 2 for entry in scored.logprobs)


def test_a_stream_says_the_same(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, max_tokens=1500, **GREEDY)  # long: what waits for the reader comes as one piece
    pieces = list(llm.stream(PROMPT, max_tokens=1500, **GREEDY))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1


@pytest.mark.integration
def test_chat(real: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    done = real.chat(messages, temperature=0, max_tokens=60)
    assert "Paris" in done.text
    assert (done.finish_reason, done.usage.completion_tokens) == ("stop", len(done.tokens))
    assert "".join(real.stream_chat(messages, temperature=0, max_tokens=60)) == done.text
    assert real.chat(messages, temperature=0, max_tokens=3).finish_reason == "length"


@pytest.mark.integration
def test_stop_strings(real: LLM) -> None:
    prompt = "Once upon a time"
    [whole] = real.generate(prompt, max_tokens=40, temperature=0)
    stop = whole.text[len(whole.text) // 2 :][:6]
    before = whole.text[: whole.text.index(stop)]
    [stopped] = real.generate(prompt, max_tokens=40, temperature=0, stop=stop)
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (before, "stop", stop)
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert stopped.usage.completion_tokens == len(stopped.tokens) < len(whole.tokens)
    assert "".join(real.stream(prompt, max_tokens=40, temperature=0, stop=["never!", stop])) == before
    wait_until_idle(real)


def test_closing_a_stream_early_cancels(llm: LLM) -> None:
    for _ in range(5):
        stream = llm.stream(PROMPT, max_tokens=4000, **GREEDY)
        next(stream)
        assert llm._stack.runtime.budget().held > 0
        stream.close()  # type: ignore[attr-defined]
        wait_until_idle(llm)
    for piece in llm.stream(PROMPT, max_tokens=4000, **GREEDY):
        assert piece
        break
    wait_until_idle(llm)


def test_errors(llm: LLM) -> None:
    with pytest.raises(InvalidValue, match="temprature"):
        llm.generate(PROMPT, temprature=0)
    with pytest.raises(InvalidValue, match="temperature: found -1"):
        llm.generate(PROMPT, temperature=-1)
    with pytest.raises(InvalidRequest, match="top_p"):
        list(llm.stream(PROMPT, top_p=1.5))
    with pytest.raises(ContextLengthExceeded, match="4096"):
        llm.generate([5] * 4000, max_tokens=97)
    with pytest.raises(ContextLengthExceeded):
        llm.generate([5] * 5000)
    with pytest.raises(InvalidValue, match="301"):
        llm.generate([5, 301], max_tokens=1)
    with pytest.raises(InvalidValue, match=r"logit_bias\.301: .* token id from 0 to 300"):
        llm.generate(PROMPT, max_tokens=1, logit_bias={301: 1.0})
    with pytest.raises(InvalidValue, match=r"stop_token_ids\[0\]: found -1, expected an integer from 0 to 300"):
        llm.generate(PROMPT, max_tokens=1, stop_token_ids=(-1,))
    with pytest.raises(InvalidValue, match="stop: found a string of 0 characters"):
        llm.generate(PROMPT, max_tokens=1, stop="")
    with pytest.raises(InvalidValue, match="prompt"):
        llm.generate([[]], max_tokens=1)
    with pytest.raises(InvalidValue, match="max_tokens"):
        llm.generate(PROMPT, max_tokens=0)
    with pytest.raises(InvalidRequest):
        llm.chat([{"role": "nobody", "content": 3}], max_tokens=1)
    wait_until_idle(llm)
    assert llm.generate(PROMPT, max_tokens=2, **GREEDY), "it goes on"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": "1"}, "temperature: found the string '1', expected a number"),
        ({"temperature": None, "top_k": 1.5}, "top_k: found 1.5, expected an integer"),
        ({"max_tokens": True}, "max_tokens: found true"),
        ({"stop": 3}, "stop: found 3"),
        ({"stop": [b"x"]}, r"stop\[0\]: found a bytes"),
        ({"seed": object()}, "seed: found a object"),
        ({"logit_bias": [1]}, "logit_bias: found an array"),
        ({"ignore_eos": 1}, "ignore_eos: found 1, expected true or false"),
        ({"logprobs": 21}, "logprobs: found 21, expected an integer from 0 to 20"),
        ({"stream": True}, "unknown option 'stream'"),
    ],
    ids=str,
)
def test_wrong_types_are_errors_of_ours(llm: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(PROMPT, **options)
    with pytest.raises(InvalidRequest, match=words):
        list(llm.stream_chat([{"role": "user", "content": "x"}], **options))


@pytest.mark.parametrize("prompt", [5, None, [1.5], ["a", 3], [[1], None], b"bytes", [[]], {"a": 1}], ids=repr)
def test_prompts_that_are_none(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(prompt, max_tokens=1)


def test_the_api_s_extras(llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, **GREEDY}
    [plain] = llm.generate(PROMPT, **fields)
    [scored] = llm.generate(PROMPT, prompt_logprobs=2, **fields)
    assert scored.prompt_logprobs is not None
    assert [entry and entry.token for entry in scored.prompt_logprobs] == [None, *PROMPT[1:]]
    assert all(entry is None or len(entry.top) == 2 for entry in scored.prompt_logprobs)
    assert (scored.tokens, plain.prompt_logprobs) == (plain.tokens, None)
    [only] = llm.generate(PROMPT, max_tokens=0, prompt_logprobs=2)
    assert (only.prompt_logprobs, only.tokens, only.text) == (scored.prompt_logprobs, [], "")
    [ended] = llm.generate(PROMPT, stop_token_ids=(plain.tokens[3],), **fields)
    assert (ended.tokens[-1], ended.finish_reason, ended.stop_reason) == (plain.tokens[3], "stop", plain.tokens[3])
    [late] = llm.generate(PROMPT, stop_token_ids=(plain.tokens[3],), min_tokens=12, **fields)
    assert plain.tokens[3] not in late.tokens
    stop = plain.text[2:4]
    [kept] = llm.generate(PROMPT, stop=stop, include_stop_str_in_output=True, **fields)
    assert kept.text == plain.text[: plain.text.index(stop) + len(stop)]
    assert len(llm.generate([PROMPT, PROMPT[:3]], n=2, **fields)) == 4


def test_errors_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(InvalidValue, match="thread_count"):
        LLM(str(tiny_model), thread_count=2)
    with pytest.raises(ConfigError, match="page-tokens"):
        LLM(str(tiny_model), page_tokens=16)
    with pytest.raises(ModelNotFound, match="smollm2"):
        LLM("smolm2", offline=True)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFileError):
        LLM(str(tmp_path / "bad.gguf"))
    with pytest.raises(ConfigError, match="max-context"):
        LLM(str(tiny_model), max_context=1 << 20)
    assert set(threading.enumerate()) <= before, "a failed start leaves no thread"


def test_from_many_threads(llm: LLM) -> None:
    expected = [llm.generate(PROMPT[: 1 + n], max_tokens=30, **GREEDY)[0].tokens for n in range(8)]
    got: list[list[int]] = [[] for _ in range(8)]

    def ask(number: int) -> None:
        for _ in range(3):
            got[number] = llm.generate(PROMPT[: 1 + number], max_tokens=30, **GREEDY)[0].tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


ONE_AFTER_ANOTHER = """
import gc, json, os, sys, threading
from ai_engine import LLM
from tests.integration.client import num_descriptors, resident_bytes

path, me = sys.argv[1], os.getpid()
for _ in range(14):
    llm = LLM(path, kv_memory=32 << 20)
    answer = llm.generate("one two three", max_tokens=5, temperature=0, ignore_eos=True)[0].tokens
    before = resident_bytes(me)
    llm.close()
    given_back = before - resident_bytes(me)
    llm.close()
    gc.collect()  # weights and pages are gone by now; objects in cycles go when Python looks
    print(json.dumps([answer, given_back, resident_bytes(me), threading.active_count(), num_descriptors(me)]))
"""


def test_one_after_another_leaves_nothing(tmp_path: Path) -> None:
    """Weights of 17 MB: what `close` does not give back shows. In a process of its own, whose heap is small."""
    path = write_model(tmp_path, "llama", "F32", hidden=512, ffn=1536, layers=4)
    child = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    answers, given_back, sizes, threads, descriptors = zip(*map(json.loads, child.stdout.splitlines()), strict=True)
    assert all(answer == answers[0] for answer in answers)
    assert min(given_back) > path.stat().st_size / 2, "weights are given back by close itself"
    # The allocator's heaps, one per thread that ever lived, grow with the first few; a leak of the weights, the pages
    # or a workspace would add 17 MB or more in each of the last seven.
    assert min(sizes[10:]) - max(sizes[4:8]) < 8_000_000, sizes
    assert len(set(threads[1:])) == 1, threads
    assert len(set(descriptors[1:])) == 1, descriptors


def test_two_at_the_same_time(tiny_model: Path, llm: LLM) -> None:
    [expected] = llm.generate(PROMPT, max_tokens=20, **GREEDY)
    with LLM(str(tiny_model), threads=1, max_context=512) as other:
        assert other.max_context == 512
        stream = llm.stream(PROMPT, max_tokens=20, **GREEDY)
        first = next(stream)
        assert other.generate(PROMPT, max_tokens=20, **GREEDY)[0].tokens == expected.tokens
        assert first + "".join(stream) == expected.text


def test_closed_while_a_stream_is_open(tiny_model: Path) -> None:
    """The stream ends with an error that says why; nobody hangs."""
    llm = LLM(str(tiny_model), max_context=8192)
    stream = llm.stream(PROMPT, max_tokens=8000, **GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(Exception, match=r"stop|clos|shut"):
        list(stream)
    with pytest.raises(Exception, match="closed"):
        llm.generate(PROMPT, max_tokens=1)
