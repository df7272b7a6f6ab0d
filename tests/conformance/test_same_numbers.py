"""Same model, same numbers: the engine's logits on the real models against a float64 forward, beside llama.cpp's.

`make test` checks a slice of 100 tokens, the most likely ids and the greedy continuations; `make full` all documents,
with the acceptance's bounds, and writes the scores as JSON into the folder that AI_ENGINE_EVIDENCE names.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import model_path
from tests.golden import engine, goldens
from tests.golden.reference import top1

SLICE = ("dialogue", 100)
SLICE_BOUNDS = {"mean_ratio": 1.5, "p99_ratio": 2.5, "top1_slack": 0.05}
"""Two equally good engines differ by about this much over 100 positions (1 in 100 windows of them by more)."""
BOUNDS = {"mean_ratio": 1.1, "p99_ratio": 1.3, "top1_slack": 0.005}
"""The acceptance's. On SmolLM2 llama.cpp without flash attention is at 0.97, 0.86 and 0.54 points below its default."""
CLEAR_LEAD = 1.5
"""A lead in logits that rounding does not turn: errors are about 0.1, and 1.2 at one of 128 positions of Gemma."""


def _checked_path(golden: goldens.ModelGolden) -> Path:
    path = model_path(golden.name)
    assert goldens.sha256_of(path) == golden.sha256, f"{path} is not the file that the goldens were made from"
    return path


@pytest.mark.parametrize("model", goldens.MODELS)
def test_slice(model: str) -> None:
    golden = goldens.load(model)
    path = _checked_path(golden)
    name, num_tokens = SLICE
    (document,) = (d.head(num_tokens) for d in golden.documents if d.name == name)
    reference = goldens.reference_of(path, whole=False)
    result = goldens.compare(reference, document, engine.teacher_forced_logits(path, document.ids))
    score = goldens.score([document], [result])
    assert score.num_tokens == 100
    assert not score.failures(**SLICE_BOUNDS), score


@pytest.mark.parametrize("model", goldens.MODELS)
def test_most_likely_ids_of_all_documents(model: str) -> None:
    """Against the reference's committed ids, so without the float64 forward."""
    golden = goldens.load(model)
    path = _checked_path(golden)
    with engine.loaded(path) as loaded:
        agrees = [top1(loaded.logits(d.ids)) == d.reference_top1 for d in golden.documents]
    expected = float(np.mean(np.concatenate([d.llamacpp_top1_agrees for d in golden.documents])))
    assert float(np.mean(np.concatenate(agrees))) >= expected - BOUNDS["top1_slack"]


@pytest.mark.parametrize("model", goldens.MODELS)
def test_greedy_continuations(model: str) -> None:
    """Wherever llama.cpp's choice led by more than either engine's error, the engine makes it too."""
    golden = goldens.load(model)
    path = _checked_path(golden)
    with engine.loaded(path) as loaded:
        for greedy in golden.greedy:
            logits = loaded.logits((greedy.ids + greedy.continuation)[:-1])[len(greedy.ids) - 1 :]
            clear = np.array(greedy.leads) > CLEAR_LEAD
            assert clear.sum() >= 3, "the golden has nothing to say"
            assert np.array_equal(logits.argmax(axis=-1)[clear], np.array(greedy.continuation)[clear])


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", goldens.MODELS)
def test_all_documents(model: str) -> None:
    golden = goldens.load(model)
    path = _checked_path(golden)
    assert sum(len(d.ids) for d in golden.documents) >= 2000
    reference = goldens.reference_of(path, whole=True)
    with engine.loaded(path) as loaded:
        results = [goldens.compare(reference, d, loaded.logits(d.ids)) for d in golden.documents]
    score = goldens.score(golden.documents, results)
    if folder := os.environ.get("AI_ENGINE_EVIDENCE"):
        evidence = {"model": model, "sha256": golden.sha256, "machine": _machine(), **asdict(score)}
        (Path(folder) / f"same-numbers-{model}.json").write_text(
            json.dumps(evidence, indent=1) + "\n", encoding="utf-8"
        )
    assert not score.failures(**BOUNDS), score


def test_the_comparison_can_fail() -> None:
    """A worse engine is found out: llama.cpp's own golden passes its bounds, and noise on the logits does not."""
    golden = goldens.load("smollm2")
    documents = golden.documents
    own = [(d.kl.astype(np.float64), d.llamacpp_top1_agrees) for d in documents]
    assert not goldens.score(documents, own).failures(**BOUNDS)
    worse = [(kl * 1.5, agrees) for kl, agrees in own]
    assert len(goldens.score(documents, worse).failures(**BOUNDS)) == 2
    flipped = [(kl, agrees & (np.arange(agrees.size) % 50 != 0)) for kl, agrees in own]
    assert len(goldens.score(documents, flipped).failures(**BOUNDS)) == 1
    missing: list[tuple[NDArray[np.float64], NDArray[np.bool_]]] = [(kl * np.nan, agrees) for kl, agrees in own]
    assert len(goldens.score(documents, missing).failures(**BOUNDS)) == 2


def _machine() -> str:
    system = f"{platform.system()} {platform.release()}"
    return f"{platform.machine()}, {os.cpu_count()} cores, {system}, Python {platform.python_version()}"
