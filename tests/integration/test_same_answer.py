"""The same answer in any company: tokens and logprobs equal in every bit, greedy and seeded.

Alone, in a batch of 16, in chunks of 1, 3, 5, 7, 13 and 64, after preemption, with guesses right and wrong, with a
prefix hit or cold, forked, on one thread or two, with the kernel cache cold or warm; tiny models of every architecture
and storage type on every instruction set of this machine, and SmolLM2.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ai_engine.ports.errors import UnsupportedModel
from ai_engine.ports.runtime import Work
from ai_engine.ports.sampling import SamplingParams
from ai_engine.runtime.engine import Engine
from tests.conftest import ROOT
from tests.golden.tiny_gguf import TYPES
from tests.integration.engines import (
    ARCHITECTURES,
    Answer,
    Ask,
    alone,
    asks,
    compute,
    engine_of,
    guessed,
    in_company,
    needs_target,
    open_ask,
    preempted,
    release,
    step,
    write_model,
)

CHUNKS = (1, 3, 5, 7, 13, 64)
NUM_TOKENS = 8

CASES = [("auto", architecture, type_name) for architecture in ARCHITECTURES for type_name in TYPES]
"""The best instruction set runs everything; a lower one every type, and every architecture on three kinds of type."""
CASES += [
    ("avx2", architecture, type_name)
    for architecture in ARCHITECTURES
    for type_name in TYPES
    if architecture == "llama" or type_name in ("Q8_0", "BF16", "Q5_K")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def assert_same(got: Sequence[Answer], expected: Sequence[Answer], how: str) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.tokens == other.tokens, (how, number)
        assert one.bits == other.bits, (how, number)


def check_engine(engine: Engine, asked: Sequence[Ask], solo: Sequence[Answer], chunks: Sequence[int]) -> None:
    """Everything that one engine can do differently."""
    assert_same(in_company(engine, asked, 1), solo, "batch")
    for chunk in chunks:
        assert_same([alone(engine, ask, chunk=chunk) for ask in asked[:2]], solo[:2], f"chunk {chunk}")
    assert_same([alone(engine, ask, chunk=7) for ask in asked[2:4]], solo[2:4], "chunk 7")
    with_guesses = [guessed(engine, ask, answer, n) for n, (ask, answer) in enumerate(zip(asked, solo, strict=True))]
    assert_same(with_guesses, solo, "guesses")
    for number, at in enumerate(({"prompt": 33, "output": 3}, {"prompt": 7, "output": 5})):
        assert_same([preempted(engine, asked[number], at)], solo[number : number + 1], "preempted")
    alone(engine, asked[0])
    assert open_ask(engine, 1, asked[0]) < len(asked[0].prompt), "no prefix was found"
    release(engine, 1)
    assert_same([alone(engine, asked[0], cold=False)], solo[:1], "prefix hit")
    check_fork(engine, asked[0], solo[0])


def check_fork(engine: Engine, ask: Ask, solo: Answer) -> None:
    """Two forks of one prompt, stepped together with their donor."""
    engine.pool.drop_cache()
    answers = [Answer(), Answer(), Answer()]
    compute(engine, 1, open_ask(engine, 1, ask), 256, answers[0], 1)
    for seq_id in (2, 3):
        assert open_ask(engine, seq_id, ask, fork_of=1) == 1
    while len(answers[1].tokens) < len(solo.tokens):
        work = [Work(seq_id, 1) for seq_id in (1, 2, 3) if len(answers[seq_id - 1].tokens) < len(solo.tokens)]
        for item, output in zip(work, step(engine, work), strict=True):
            answers[item.seq_id - 1].take(output)
    release(engine, 1, 2, 3)
    assert_same(answers, [solo] * 3, "fork")


@pytest.mark.parametrize(("target", "architecture", "type_name"), CASES)
def test_tiny_models(target: str, architecture: str, type_name: str, folder: Path) -> None:
    needs_target(target)
    path = write_model(folder, architecture, type_name)
    asked = asks(16, NUM_TOKENS)
    with engine_of(path, threads=1, target=target) as engine:
        solo = [alone(engine, ask) for ask in asked]
        assert_same(in_company(engine, asked, 2), solo, "batch on one thread")
    assert len({token for answer in solo for token in answer.tokens}) > 8, "the same whatever it reads"
    with engine_of(path, threads=2, target=target) as engine:
        check_engine(engine, asked, solo, CHUNKS)


@pytest.mark.parametrize("target", ["auto", "avx2"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_int8_keys_and_values(target: str, architecture: str, folder: Path) -> None:
    """As exact in any company as f16, in a bit more than half the memory, and not the same numbers."""
    needs_target(target)
    path = write_model(folder, architecture, "Q8_0")
    asked = asks(8, NUM_TOKENS)
    with engine_of(path, threads=1, target=target, kv_type="int8") as engine:
        solo = [alone(engine, ask) for ask in asked]
        assert_same(in_company(engine, asked, 2), solo, "batch on one thread")
    with engine_of(path, threads=2, target=target, kv_type="int8") as engine:
        check_engine(engine, asked, solo, CHUNKS)
        page_bytes = engine.plan.page_bytes
    with engine_of(path, threads=2, target=target) as engine:
        assert page_bytes < 0.54 * engine.plan.page_bytes
        assert [alone(engine, ask).bits for ask in asked] != [answer.bits for answer in solo]


@pytest.mark.parametrize("target", ["auto", "avx2"])
def test_approximate_head(target: str, tmp_path: Path) -> None:
    """A screened row's answer is its own, whoever stands beside it; who may not be screened gets the exact answer."""
    needs_target(target)
    path = write_model(tmp_path, "llama", "Q8_0", vocab=5000)
    exact = asks(8, NUM_TOKENS)
    kinds = [SamplingParams(temperature=0.0, seed=1, max_tokens=NUM_TOKENS)]
    kinds.append(SamplingParams(temperature=1.5, top_k=32, seed=2, max_tokens=NUM_TOKENS))
    asked = [Ask(ask.prompt, kinds[number // 3 % 2]) if number % 3 else ask for number, ask in enumerate(exact)]
    with engine_of(path, threads=1, target=target) as engine:
        want = [alone(engine, ask) for ask in asked]
        assert_same(in_company(engine, asked, 2), want, "an exact head")
    with engine_of(path, threads=1, target=target, approximate_head=True) as engine:
        solo = [alone(engine, ask) for ask in asked]
        assert_same(in_company(engine, asked, 2), solo, "batch on one thread")
        assert_same(solo[::3], want[::3], "rows with logprobs")
        slots = [slot.kernel for slot in engine.program.slots]
        assert slots[-4:-1] == ["matmul_q8_0_split", "matmul_q8_0_screen", "refine_head"]
    with engine_of(path, threads=2, target=target, approximate_head=True) as engine:
        check_engine(engine, asked, solo, CHUNKS)
    assert sum(a.tokens == b.tokens for a, b in zip(solo, want, strict=True)) >= 6


def test_approximate_head_needs_q8_0(folder: Path) -> None:
    path = write_model(folder, "llama", "Q4_K")
    with (
        pytest.raises(UnsupportedModel, match=r"--approximate-head needs.*Q8_0.*Q4_K"),
        engine_of(path, approximate_head=True),
    ):
        pass


@pytest.mark.parametrize("threads", [3, 4])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_more_threads_than_the_work_has_parts(architecture: str, threads: int, folder: Path) -> None:
    path = write_model(folder, architecture, "Q4_K")
    asked = asks(4, NUM_TOKENS)
    with engine_of(path, threads=1) as engine:
        solo = [alone(engine, ask) for ask in asked]
    with engine_of(path, threads=threads) as engine:
        assert_same(in_company(engine, asked, 3), solo, f"{threads} threads")


def test_page_sizes(folder: Path) -> None:
    path = write_model(folder, "gemma3_text", "Q8_0")
    asked = asks(4, NUM_TOKENS)
    with engine_of(path) as engine:
        solo = [alone(engine, ask) for ask in asked]
    with engine_of(path, page_tokens=64) as engine:
        assert_same(in_company(engine, asked, 3), solo, "pages of 64")


@pytest.mark.integration
def test_smollm2(smollm2: Path) -> None:
    asked = asks(16, 12, vocab=49152, longest=70)
    with engine_of(smollm2, threads=2) as engine:
        solo = [alone(engine, ask) for ask in asked]
        check_engine(engine, asked, solo, (5, 13))
    with engine_of(smollm2, threads=1) as engine:
        assert_same(in_company(engine, asked, 2), solo, "batch on one thread")


def digest_of(path: Path) -> str:
    """What a process with this environment answers."""
    with engine_of(path) as engine:
        answers = [alone(engine, ask) for ask in asks(8, NUM_TOKENS)]
    return hashlib.sha256(b"".join(answer.bits for answer in answers)).hexdigest()


@pytest.mark.timeout(300)
def test_kernel_cache_cold_and_warm(folder: Path, tmp_path: Path) -> None:
    """Separate processes over an empty cache folder, then over what the first one left there."""
    path = write_model(folder, "qwen3", "Q4_K")
    code = "import pathlib, sys\nfrom tests.integration.test_same_answer import digest_of\n"
    code += "print(digest_of(pathlib.Path(sys.argv[1])))"
    said, built = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, "AI_ENGINE_CACHE": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
        built.append([(file.name, file.stat().st_mtime_ns) for file in sorted((tmp_path / "kernels").glob("*.bin"))])
    assert len(built[0]) == 1
    assert built[0] == built[1], "the second process built again"
    assert said == [digest_of(path)] * 2
