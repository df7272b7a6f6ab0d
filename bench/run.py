"""`make bench`: the whole set, each part bounded in time; JSON and SVG go to bench/results with the machine's identity.

    python -m bench.run [--list] [--only PART[,PART]] [--quick]

The comparisons with llama.cpp need its binaries: --llama-bin or AI_ENGINE_LLAMA_BIN; otherwise they are built once,
which takes some ten minutes. Owns which parts there are and their order.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import random_model
from bench.machine import RESULTS

SCRATCH = RESULTS.parents[1] / "build" / "bench"
"""Where quick results go, which nobody commits."""
CLI = [sys.executable, "-m", "ai_engine.cli", "bench"]
LLAMA = ["compare", "llama.cpp"]
Q4_0 = ["--requantize", "Q4_0"]
BIG = "{big}"  # the 1.5-billion-parameter model, written for the run

PARTS: dict[str, list[str]] = {
    "machine": [*CLI, "machine", "--minutes", "1"],
    "kernels": [*CLI, "kernels", "--minutes", "1"],
    "q4_1": [*CLI, *LLAMA, "smollm2", "--minutes", "2.5"],
    "q4_0": [*CLI, *LLAMA, "smollm2", *Q4_0, "--minutes", "2.5"],
    "gemma": [*CLI, *LLAMA, "gemma3-270m", "--minutes", "3"],
    "big": [*CLI, "model", BIG, "--decode-only", "--thread-counts", "1,2", "--steps", "16", "--minutes", "2"],
    "server-q4_1": [*CLI, *LLAMA, "smollm2", "--what", "server", "--minutes", "12"],
    "server-q4_0": [
        *CLI,
        *LLAMA,
        "smollm2",
        "--what",
        "server",
        "--minutes",
        "8",
        *Q4_0,
        "--workload",
        "streams,single",
    ],
    "serve": [*CLI, "serve", "smollm2", "--workload", "S1,S2,S3,S4,S5,S6,S8", "--rounds", "3", "--minutes", "2.5"],
    "footprint": [sys.executable, "-m", "bench.footprint"],
    "speculation": [sys.executable, "-m", "bench.speculation", "--save"],
}
OWN_OUTPUT = ("footprint", "speculation")
"""Scripts of this folder, which know where results go."""


def command(name: str, big: Path, llama_bin: str, quick: bool) -> list[str]:
    words = [str(big) if word == BIG else word for word in PARTS[name]]
    if name not in OWN_OUTPUT:
        words += ["--out", str(SCRATCH if quick else RESULTS)]
    if "llama.cpp" in words and llama_bin:
        words += ["--llama-bin", llama_bin]
    return [*words, "--quick"] if quick and name != "speculation" else words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, by name")
    parser.add_argument("--llama-bin", default="", help="folder of llama.cpp's binaries")
    parser.add_argument("--quick", action="store_true", help="seconds each, to see that it works; not to be committed")
    parser.add_argument("--list", action="store_true", help="print the commands and do nothing")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; use some of {', '.join(PARTS)}")
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder) / "random-1.5b.gguf"
        if "big" in names and not args.list:
            random_model.write(big)
        for name in names:
            words = command(name, big, args.llama_bin, args.quick)
            sys.stdout.write(f"== {name}: {' '.join(words[1:])}\n")
            sys.stdout.flush()
            if not args.list:
                started = time.monotonic()
                status |= subprocess.run(words, check=False).returncode
                sys.stdout.write(f"== {name}: {time.monotonic() - started:.0f} s\n")
    return 1 if status else 0


if __name__ == "__main__":
    raise SystemExit(main())
