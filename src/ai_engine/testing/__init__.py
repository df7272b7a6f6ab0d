"""Fakes of every port, for tests of one layer without the others. They import ports and nothing else of ours.
Beside them, what tests and benchmarks share to look at a server from outside.

clock.py      VirtualClock: time that moves when told
telemetry.py  MemoryTelemetry: keeps events in a list
runtime.py    FakeRuntime: real page accounting, no model; HashModel and ScriptedModel choose the tokens
kernels.py    NullKernels: real sizes, no arithmetic
model.py      RandomModel: a model file of random weights
text.py       ByteTokenizer, FakeTemplate: bytes are tokens
serving.py    ScriptedServing: chunks by script, with delays and mid-stream failures
arena.py      PlainArena: ordinary memory
process.py    Server: `ai-engine serve` as a child process; not imported here
"""

from ai_engine.testing.arena import PlainArena
from ai_engine.testing.clock import VirtualClock
from ai_engine.testing.kernels import NullKernels
from ai_engine.testing.model import RandomModel
from ai_engine.testing.runtime import FakeRuntime, HashModel, ScriptedModel
from ai_engine.testing.serving import HANG, ScriptedServing, answer, failing
from ai_engine.testing.telemetry import MemoryTelemetry
from ai_engine.testing.text import ByteTokenizer, FakeTemplate

__all__ = [
    "HANG",
    "ByteTokenizer",
    "FakeRuntime",
    "FakeTemplate",
    "HashModel",
    "MemoryTelemetry",
    "NullKernels",
    "PlainArena",
    "RandomModel",
    "ScriptedModel",
    "ScriptedServing",
    "VirtualClock",
    "answer",
    "failing",
]
