"""`make bench`: footprint, then speed beside llama.cpp where LLAMA_BENCH names its llama-bench."""

from __future__ import annotations

import subprocess
import sys

PARTS = (["bench.footprint"], ["bench.compare"], ["bench.compare", "--model", "gemma3-270m"])


def main() -> int:
    status = 0
    for part in PARTS:
        sys.stdout.write(f"== {' '.join(part)}\n")
        sys.stdout.flush()
        status |= subprocess.run([sys.executable, "-m", *part], check=False).returncode
    return status


if __name__ == "__main__":
    raise SystemExit(main())
