"""What is asked of a server: prompts of exact length and the workloads S1 to S8 of the benchmarking page.

Owns texts, lengths and bodies. Prompts are English words in random order behind a salt, so that no run finds another's
prefix in a cache. They are token ids where the model's file is at hand (two servers get the same), else text.
S7 (structured output) is an evaluation of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ai_engine import app
from ai_engine.bench.client import payload
from ai_engine.bench.load import Ask
from ai_engine.data.models import open_model

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education the of and to in is that for it was on are as with his they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how
"""
_WORDS_PER_TOKEN = 0.8


@dataclass(frozen=True)
class Shape:
    """A workload's name, streams and lengths in tokens."""

    name: str
    title: str
    streams: int
    prompt: int
    output: int
    requests: int


SHAPES = {
    "S1": Shape("S1", "one stream, 128 in, 128 out", 1, 128, 128, 12),
    "S2": Shape("S2", "8 streams, 128 in, 128 out", 8, 128, 128, 32),
    "S3": Shape("S3", "prompts: 4 streams, 1024 in, 16 out", 4, 1024, 16, 24),
    "S4": Shape("S4", "open loop, mixed lengths, 30/60/90 % of the measured most", 8, 0, 0, 40),
    "S5": Shape("S5", "a prompt of 4,000 tokens against 4 running streams", 4, 64, 448, 5),
    "S6": Shape("S6", "16 requests that share 512 tokens, 32 more each, 64 out", 8, 512, 64, 16),
    "S8": Shape("S8", "cancel storm: half of the clients leave", 8, 128, 128, 48),
}


class Prompts:
    """Makes prompts and bodies. ``extra`` goes into every body (a server's own sampling fields)."""

    def __init__(
        self, url: str, model_id: str, model: Path | None, seed: int, extra: dict[str, Any] | None = None, key: str = ""
    ) -> None:
        self.url, self.model_id, self._extra, self._key = url, model_id, extra or {}, key
        self._rng = np.random.default_rng(seed)
        self._text: Any = None
        if model is not None:
            with contextlib.closing(open_model(model)) as file:
                self._text = app.build_text(file.tokenizer())

    def reseed(self, seed: int) -> None:
        """Whoever is reseeded alike makes the same prompts from here on."""
        self._rng = np.random.default_rng(seed)

    def close(self) -> None:
        if self._text is not None:
            self._text.close()

    def words(self, num_tokens: int) -> str:
        """About as many words as ``num_tokens`` need, behind a salt."""
        salt = f"{self._rng.integers(1 << 60):x}"
        return f"{salt} " + " ".join(self._rng.choice(WORDS.split(), max(1, num_tokens)))

    def prompt(self, num_tokens: int, prefix: Sequence[int] = ()) -> Any:
        """``num_tokens`` ids after ``prefix`` (ids), or a text of about that length."""
        text = self.words(num_tokens + 8)
        if self._text is None:
            return " ".join(text.split(" ")[: max(1, round(num_tokens * _WORDS_PER_TOKEN))])
        ids = asyncio.run(self._text.encode_prompt(text)).ids
        assert len(ids) >= num_tokens, (len(ids), num_tokens)
        return [*prefix, *(int(i) for i in ids[:num_tokens])]

    def shared(self, num_tokens: int, count: int, suffix: int) -> list[Any]:
        """``count`` prompts that begin alike."""
        first = self.prompt(num_tokens)
        if self._text is None:
            return [f"{first} {self.prompt(suffix)}" for _ in range(count)]
        return [self.prompt(suffix, first) for _ in range(count)]

    def ask(self, prompt: Any, output: int, *, name: str = "", abort_after_s: float | None = None) -> Ask:
        """Greedy, exactly ``output`` tokens, streamed with usage."""
        body = {
            "model": self.model_id, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, **self._extra,
        }  # fmt: skip
        return Ask(payload(self.url, "/v1/completions", body, self._key), name, abort_after_s)

    def asks(self, count: int, prompt: int, output: int, name: str = "") -> list[Ask]:
        return [self.ask(self.prompt(prompt), output, name=name) for _ in range(count)]

    def mixed(self, count: int) -> tuple[list[Ask], float]:
        """Lengths as in conversations: log-normal prompts (median 90, 4 to 1024) and outputs (median 110, 4 to 384);
        and the mean output."""
        prompts = np.clip(self._rng.lognormal(np.log(90), 1.1, count), 4, 1024).astype(int)
        outputs = np.clip(self._rng.lognormal(np.log(110), 0.8, count), 4, 384).astype(int)
        pairs = zip(prompts.tolist(), outputs.tolist(), strict=True)
        return [self.ask(self.prompt(p), o, name="mixed") for p, o in pairs], float(outputs.mean())

    def arrivals_rng(self) -> np.random.Generator:
        return self._rng
