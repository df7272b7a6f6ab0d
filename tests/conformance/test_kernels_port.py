"""The kernels port: one small program on every implementation gives close numbers; on the CPU equal bits, whatever the
batch, the chunks, the threads, and whether the kernels came from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ai_engine.hardware.team import NativeTeam
from ai_engine.kernels.cpu import build
from ai_engine.kernels.cpu.backend import CpuKernels
from ai_engine.kernels.cpu.lang import AVX2, AVX512
from ai_engine.kernels.reference import ReferenceKernels
from ai_engine.ports.kernels import Kernels, SampleOut
from ai_engine.ports.model import DType
from tests.conformance.programs import Model, Session, copied

IDS = [int(i) for i in np.random.default_rng(11).integers(0, 301, 90)]
RUNNABLE = [t for t in (AVX2, AVX512) if t.lanes <= build.host_target().lanes]


@pytest.fixture(scope="module", params=RUNNABLE, ids=lambda t: t.name)
def cpu(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    team = NativeTeam(2)
    kernels = CpuKernels(team, request.param)
    kernels.prepare()
    yield kernels
    kernels.close()
    team.close()


def mixed(name: str) -> DType:
    """As real files: a Q8_0 table, several types in a layer."""
    if "embd" in name or "output.weight" in name:
        return DType.Q8_0
    return {"attn_q": DType.Q4_1, "attn_k": DType.Q5_0, "attn_v": DType.Q6_K, "ffn_down": DType.Q4_K}.get(
        name.split(".")[2], DType.Q4_0
    )


CASES: list[tuple[str, dict[str, Any], Any]] = [  # "kv_type" among the sizes is the session's
    ("llama", {}, lambda name: DType.F32),
    ("llama", {"tie_word_embeddings": False}, mixed),
    ("qwen2", {}, lambda name: DType.Q8_0),
    ("qwen3", {}, lambda name: DType.BF16 if "ffn" in name else DType.F16),
    ("gemma3_text", {"heads": 4, "kv_heads": 1, "layers": 7}, mixed),
    ("llama", {"kv_type": "int8"}, lambda name: DType.F32),
    ("gemma3_text", {"heads": 4, "kv_heads": 1, "layers": 7, "kv_type": "int8"}, mixed),
]
IDS_OF_CASES = ["llama-f32", "llama-mixed", "qwen2-q8_0", "qwen3-bf16-f16", "gemma3-mixed"]
IDS_OF_CASES += ["llama-f32-int8", "gemma3-mixed-int8"]
cases = pytest.mark.parametrize(("architecture", "sizes", "types"), CASES, ids=IDS_OF_CASES)


def session(kernels: Kernels, architecture: str, sizes: dict[str, Any], types: Any) -> Session:
    model = {name: value for name, value in sizes.items() if name != "kv_type"}
    return Session(
        kernels, Model.random(architecture, **model), types, max_tokens=160, kv_type=sizes.get("kv_type", "f16")
    )


def conversation(s: Session) -> list[SampleOut]:
    """Odd chunks, several sequences beside each other, decode rows, a step without logits."""
    steps: list[tuple[dict[int, list[int]], str]] = [
        ({0: IDS[:1]}, "all"),
        ({0: IDS[1:14], 1: IDS[:37]}, "all"),
        ({1: IDS[37:40], 2: IDS[5:6]}, "none"),
        ({0: IDS[14:17], 1: IDS[40:41], 2: IDS[6:70], 3: IDS[:1]}, "last"),
        ({s: [7 + s] for s in range(4)}, "last"),
        ({2: IDS[:5], 3: IDS[:13]}, "all"),
    ]
    return [copied(s.step(work, logits, num_top=20)) for work, logits in steps]


@cases
def test_implementations_agree(cpu: CpuKernels, architecture: str, sizes: dict[str, Any], types: Any) -> None:
    exact, got = (conversation(session(k, architecture, sizes, types)) for k in (ReferenceKernels(), cpu))
    differences = []
    for want, have in zip(exact, got, strict=True):
        assert want.token.shape == have.token.shape
        for r in range(len(want.token)):
            logprob = dict(zip(want.top_token[r].tolist(), want.top_logprob[r].tolist(), strict=True))
            both = [(logprob[t], x) for t, x in zip(have.top_token[r].tolist(), have.top_logprob[r].tolist(), strict=True) if t in logprob]  # fmt: skip # noqa: E501
            assert len(both) >= 12
            differences += [a - b for a, b in both]
            assert want.top_logprob[r, 0] - logprob.get(int(have.token[r]), -np.inf) < 0.3
    # an act value on the edge between two codes may round either way; that is noise of 1/127 of a group's largest
    assert np.sqrt(np.mean(np.square(differences))) < (
        2e-4 if architecture == "qwen3" or types("x.y.z") is DType.F32 else 0.03
    )


def rows(outs: list[SampleOut]) -> list[bytes]:
    return [
        np.concatenate([o.top_token[r].view(np.float32), o.top_logprob[r]]).tobytes()
        for o in outs
        for r in range(len(o.token))
    ]


@cases
def test_equal_bits_in_any_company(cpu: CpuKernels, architecture: str, sizes: dict[str, Any], types: Any) -> None:
    whole = rows([session(cpu, architecture, sizes, types).step({0: IDS}, "all", num_top=20)])
    for chunks in ([1] * 20 + [3, 5, 7, 13, 42], [64, 26], [2, 88]):
        s, got, first = session(cpu, architecture, sizes, types), [], 0
        for n in chunks:
            company = {5: IDS[:2], 6: [1]} if n % 2 else {}
            out = s.step({0: IDS[first : first + n], **company}, "all", num_top=20)
            got += rows([out])[:n]
            first += n
        assert got == whole
    team = NativeTeam(1)
    alone = CpuKernels(team, cpu.target)
    alone.prepare()
    assert rows([session(alone, architecture, sizes, types).step({0: IDS}, "all", num_top=20)]) == whole
    alone.close()
    team.close()


def test_built_and_loaded_kernels_give_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AI_ENGINE_CACHE", str(tmp_path))
    results, phases = [], []
    for _ in range(2):
        team = NativeTeam(2)
        kernels = CpuKernels(team)
        seen: list[str] = []
        kernels.prepare(lambda phase, fraction, seen=seen: seen.append(phase))  # type: ignore[misc]
        results.append(rows(conversation(session(kernels, *CASES[1]))))
        phases.append(set(seen))
        kernels.close()
        team.close()
    assert "build kernels" in phases[0]
    assert "build kernels" not in phases[1]
    assert results[0] == results[1]


def test_a_page_is_copied_whole(cpu: CpuKernels) -> None:
    for kernels in (cpu, ReferenceKernels()):
        s = session(kernels, *CASES[0])
        s.step({0: IDS[:40]}, "none")
        s.pages[1] = [s._free.pop() for _ in s.pages[0]]
        s.lengths[1] = s.lengths[0]
        for source, target in zip(s.pages[0], s.pages[1], strict=True):
            kernels.copy_page(s.resources, source, target)
        out = s.step({0: IDS[40:45], 1: IDS[40:45]}, num_top=20)
        np.testing.assert_array_equal(out.top_logprob[0], out.top_logprob[1])
