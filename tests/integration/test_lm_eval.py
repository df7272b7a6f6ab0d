"""lm-eval from PyPI scores a task through /v1/completions as the engine does directly: the same log likelihoods.

Owns the comparison; the tasks are in lm_eval/. lm-eval is heavy, so it lives in a venv of its own, which .ci/run makes:
AI_ENGINE_TEST_LM_EVAL names that venv's Python. It finds the server's /tokenizer_info and uses it as its tokeniser.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ai_engine import LLM
from ai_engine.testing.process import Server

TASKS = Path(__file__).parent / "lm_eval"
VARIABLE = "AI_ENGINE_TEST_LM_EVAL"
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def samples(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval asked and heard, by task."""
    python = os.environ.get(VARIABLE)
    if python is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{VARIABLE} is not set; .ci/run installs lm-eval and sets it")
        pytest.skip(f"{VARIABLE} is not set: the Python of a venv with {TASKS.name}/requirements.txt installed")
    folder = tmp_path_factory.mktemp("lm-eval")
    model = f"model=smollm2,base_url={server.url}/v1/completions"
    asked = ["--model", "local-completions", "--model_args", model, "--tasks", "capitals,lines"]
    kept = ["--include_path", str(TASKS), "--log_samples", "--output_path", str(folder)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [python, "-m", "lm_eval", *asked, *kept],
        cwd=TASKS,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for file in folder.rglob("samples_*.jsonl"):
        found[file.name.split("_")[1]] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), max_context=2048) as made:
        yield made


def encode(llm: LLM, text: str) -> list[int]:
    return llm._call(llm._stack.text.encode_prompt(text, add_special=False)).ids


def score(llm: LLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """(log likelihood, whether greedy decoding says the same) of the continuation, computed by the engine itself."""
    [done] = llm.generate(context + continuation, max_tokens=0, prompt_logprobs=1)
    assert done.prompt_logprobs is not None
    scores = [entry for entry in done.prompt_logprobs[len(context) :] if entry is not None]
    assert len(scores) == len(continuation)
    return sum(entry.logprob for entry in scores), all(entry.top[0][1] == entry.logprob for entry in scores)


def test_continuations(samples: dict[str, list[dict[str, Any]]], llm: LLM) -> None:
    assert len(samples["capitals"]) == 6
    for sample in samples["capitals"]:
        for given, [heard] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context = encode(llm, given["arg_0"])
            whole = encode(llm, given["arg_0"] + given["arg_1"])
            logprob, is_greedy = score(llm, context, whole[len(context) :])
            assert (float(heard[0]), heard[1] == "True") == (logprob, is_greedy), given


def test_whole_texts(samples: dict[str, list[dict[str, Any]]], llm: LLM) -> None:
    assert len(samples["lines"]) == 6
    text = llm._stack.text
    prefix = min(text.eos_ids) if text.bos_id is None else text.bos_id
    for sample in samples["lines"]:
        [[heard]] = sample["resps"]
        logprob, _ = score(llm, [prefix], encode(llm, sample["arguments"]["gen_args_0"]["arg_0"]))
        assert float(heard) == logprob, sample["arguments"]
