"""Reads the committed goldens of the real models and scores an engine against them.

Owns the file format (with make_golden.py, which writes it) and the acceptance rule of "same model, same numbers".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.reference import Reference, config_from_gguf, kl_divergence, top1
from tests.golden.tiny_gguf import read_gguf

HERE = Path(__file__).parent
MODELS = ("smollm2", "gemma3-270m")
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Document:
    """One teacher-forced document, with llama.cpp's results at each position."""

    name: str
    ids: list[int]
    kl: NDArray[np.float32]  # KL(float64 reference || llama.cpp)
    reference_top1: NDArray[np.int32]
    llamacpp_top1_agrees: NDArray[np.bool_]

    @property
    def text(self) -> str:
        return (HERE / "text" / f"{self.name}.txt").read_bytes().decode("utf-8")

    def head(self, num_tokens: int) -> Document:
        """The first tokens only; the positions before them do not depend on the rest."""
        n = num_tokens
        return Document(self.name, self.ids[:n], self.kl[:n], self.reference_top1[:n], self.llamacpp_top1_agrees[:n])


@dataclass(frozen=True)
class Greedy:
    """A prompt's ids, llama.cpp's greedy ids after it, and the lead in logits that each had over the runner-up."""

    ids: list[int]
    continuation: list[int]
    leads: list[float]


@dataclass(frozen=True)
class ModelGolden:
    name: str
    sha256: str
    bos: int | None
    documents: list[Document]
    greedy: list[Greedy]


def load(name: str) -> ModelGolden:
    head: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    documents = []
    with np.load(HERE / f"{name}.npz") as arrays:
        kl, best, agrees = arrays["kl"], arrays["reference_top1"], arrays["llamacpp_top1_agrees"]
    start = 0
    for entry in head["documents"]:
        part = slice(start, start + len(entry["ids"]))
        documents.append(Document(entry["name"], entry["ids"], kl[part], best[part], agrees[part]))
        start = part.stop
    assert start == kl.size == head["num_tokens"]
    greedy = [Greedy(entry["ids"], entry["continuation"], entry["leads"]) for entry in head["greedy"]]
    return ModelGolden(name, head["sha256"], head["bos"], documents, greedy)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reference_of(path: Path, *, whole: bool) -> Reference:
    """The float64 forward of a GGUF file. `whole`: dequantise the output head once (Gemma: 0.7 GB), not per batch."""
    file = read_gguf(path)
    weights: dict[str, Any] = dict(file.tensors)
    if whole:
        weights["token_embd.weight"] = file.tensors["token_embd.weight"][:]
    return Reference(config_from_gguf(file.metadata), weights)


@dataclass(frozen=True)
class Score:
    """How far an engine's logits are from the float64 forward over some positions, beside llama.cpp's over the same."""

    num_tokens: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    llamacpp_kl_mean: float
    llamacpp_kl_p99: float
    llamacpp_top1_agreement: float

    def failures(self, *, mean_ratio: float, p99_ratio: float, top1_slack: float) -> list[str]:
        """What is not met of: mean and p99 KL within these ratios of llama.cpp's, top-1 at most this share below."""
        out = []
        if not self.kl_mean <= mean_ratio * self.llamacpp_kl_mean:
            out.append(f"mean KL {self.kl_mean:.3e} > {mean_ratio} x llama.cpp's {self.llamacpp_kl_mean:.3e}")
        if not self.kl_p99 <= p99_ratio * self.llamacpp_kl_p99:
            out.append(f"p99 KL {self.kl_p99:.3e} > {p99_ratio} x llama.cpp's {self.llamacpp_kl_p99:.3e}")
        if not self.top1_agreement >= self.llamacpp_top1_agreement - top1_slack:
            out.append(
                f"top-1 {self.top1_agreement:.2%} < llama.cpp's {self.llamacpp_top1_agreement:.2%} - {top1_slack:.2%}"
            )
        return out


def compare(reference: Reference, document: Document, logits: NDArray[np.float32]) -> tuple[F64, NDArray[np.bool_]]:
    """(KL(reference || engine), whether both agree on the most likely id) at each position of a document."""
    assert logits.dtype == np.float32
    assert logits.shape[0] == len(document.ids)
    kl: list[F64] = []
    agrees: list[NDArray[np.bool_]] = []
    for part, exact in reference.logits_in_batches(reference.hidden(document.ids)):
        assert exact.shape[1] == logits.shape[1], (exact.shape, logits.shape)
        for at in range(0, exact.shape[0], 8):  # few rows at once: up to 262,144 float64 words each
            rows = slice(part.start + at, min(part.start + at + 8, part.stop))
            kl.append(kl_divergence(exact[at : at + 8], logits[rows]))
        best = top1(exact)
        assert np.mean(best == document.reference_top1[part]) > 0.99, "the golden was made by another reference"
        agrees.append(best == top1(logits[part]))
    return np.concatenate(kl), np.concatenate(agrees)


def score(documents: Sequence[Document], results: Sequence[tuple[F64, NDArray[np.bool_]]]) -> Score:
    kl, agrees = np.concatenate([r[0] for r in results]), np.concatenate([r[1] for r in results])
    golden_kl = np.concatenate([d.kl for d in documents])
    golden_agrees = np.concatenate([d.llamacpp_top1_agrees for d in documents])
    assert kl.shape == golden_kl.shape
    return Score(
        num_tokens=int(kl.size),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.percentile(kl, 99)),
        top1_agreement=float(agrees.mean()),
        llamacpp_kl_mean=float(golden_kl.mean()),
        llamacpp_kl_p99=float(np.percentile(golden_kl, 99)),
        llamacpp_top1_agreement=float(golden_agrees.mean()),
    )
