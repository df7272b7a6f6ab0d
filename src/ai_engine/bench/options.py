"""Words and options of `ai-engine bench`. Owns nothing else: what each command does is imported when it runs, so that
the command line stays quick."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from pathlib import Path

from ai_engine.ports.errors import ConfigError

COMMANDS = {
    "machine": ("ceilings", "measure this machine's ceilings and store them"),
    "kernels": ("kernels", "speed of single operations, beside the ceilings"),
    "tune": ("tune", "measure the kernels' variants and record the faster ones for this machine"),
    "model": ("engine", "prefill, decode and batches of a model in this process"),
    "serve": ("serve", "workloads over HTTP against a server"),
    "compare": ("compare", "ratios to llama.cpp on the same file, A B A B"),
}
EPILOG = """examples:
  ai-engine bench machine
  ai-engine bench kernels --types Q4_1,Q8_0
  ai-engine bench tune --types Q4_1,f16
  ai-engine bench tune --show
  ai-engine bench model smollm2 --threads 2 --out results
  ai-engine bench serve smollm2 --workload S1,S2
  ai-engine bench serve --url http://127.0.0.1:8000 --workload S4
  ai-engine bench compare llama.cpp smollm2 --what engine --llama-bin ~/llama.cpp/build/bin

Every command is bounded (--minutes); --quick checks that it works. How to read the figures: docs/benchmarks.md.
"""


def add_bench(parser: argparse.ArgumentParser) -> None:
    """The sub-commands of ``bench`` with their options."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="bench", metavar="|".join(COMMANDS), required=True)
    subs = {name: commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
            for name, (_, text) in COMMANDS.items()}  # fmt: skip
    for name, sub in subs.items():
        sub.add_argument("--json", action="store_true", help="print JSON; tables go to standard error")
        sub.add_argument("--out", type=Path, metavar="DIR", help="write the JSON and the SVG plots there")
        sub.add_argument("--quick", action="store_true", help="a few seconds, to see that it works; not to be quoted")
        sub.add_argument("--rounds", type=int, default=0, metavar="INT", help="rounds (default 7; kernels and tune 15)")
        sub.add_argument(
            "--minutes", type=float, default=10.0, metavar="FLOAT", help="no new round starts after this (default 10)"
        )
        threads = "compute threads (default: cores in the affinity mask and cgroup quota)"
        sub.add_argument("--threads", type=int, default=0, metavar="INT", help=threads)
        if name in ("model", "compare"):
            if name == "compare":
                sub.add_argument("other", choices=["llama.cpp"], help="the other side")
            sub.add_argument("model", help="packaged name, path or hub id, as for `serve`")
    _kernels(subs["kernels"])
    _tune(subs["tune"])
    _model(subs["model"])
    _serve(subs["serve"])
    _compare(subs["compare"])


def _kernels(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--types", default="", metavar="LIST", help="weight formats, as Q4_1,Q8_0 (default: all)")
    sub.add_argument("--matmul-only", action="store_true", help="leave out attention and sampler")
    _cpu(sub)


def _tune(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--show", action="store_true", help="only print which variant each kernel uses, and why")
    formats = "formats of weights, and f16 or int8 for attention, as Q4_1,f16 (default: all)"
    sub.add_argument("--types", default="", metavar="LIST", help=formats)
    _cpu(sub)


def _cpu(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--cpu", default="auto", choices=["auto", "avx2", "avx512", "neon"], help="instruction set")


def _model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--steps", type=int, default=64, metavar="INT", help="decode steps of a case (default 64)")
    sub.add_argument("--thread-counts", default="", metavar="LIST", help="several numbers of threads, as 1,2")
    sub.add_argument("--decode-only", action="store_true", help="batch 1 at depth 0 alone (large models)")


def _serve(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", default="", help="served by a server of our own for the run; or give --url")
    sub.add_argument("--url", default="", help="any OpenAI-compatible server, as http://127.0.0.1:8000")
    sub.add_argument("--served-model", default="", metavar="ID", help="model id to ask for (default: the first listed)")
    sub.add_argument("--pid", type=int, default=0, help="the server's process, for its CPU time; children are included")
    sub.add_argument("--workload", default="S1,S2", metavar="LIST", help="of S1 to S6 and S8 (default S1,S2)")
    sub.add_argument("--slo-ttft", type=float, default=1.0, metavar="SECONDS", help="first text within (default 1)")
    sub.add_argument("--slo-tpot", type=float, default=0.1, metavar="SECONDS", help="mean per token (default 0.1)")
    sub.add_argument("--slo-gap", type=float, default=0.5, metavar="SECONDS", help="longest gap (default 0.5)")
    sub.add_argument("--seed", type=int, default=0, metavar="INT", help="of prompts and arrivals (default: a new one)")


def _compare(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--what", choices=["engine", "server"], default="engine", help="in process, or over HTTP")
    sub.add_argument(
        "--llama-bin", type=Path, metavar="DIR",
        help="llama.cpp's binaries (default: $AI_ENGINE_LLAMA_BIN, the folder of $LLAMA_BENCH, or built once)",
    )  # fmt: skip
    sub.add_argument(
        "--requantize", default="", metavar="TYPE", help="compare on the file requantised once by llama-quantize (Q4_0)"
    )
    sub.add_argument("--workload", default="streams,single,prefix", metavar="LIST", help="of the server comparison")


def _stop(number: int, frame: object) -> None:
    """SIGTERM ends a benchmark as Ctrl-C does: children are ended on the way out."""
    raise KeyboardInterrupt


def run_bench(args: argparse.Namespace) -> int:
    """Check what all commands share, then run the one that was named."""
    if not args.minutes > 0:
        raise ConfigError(f"--minutes is {args.minutes}; use more than 0", param="minutes")
    if args.rounds < 0:
        raise ConfigError(f"--rounds is {args.rounds}; use at least 1", param="rounds")
    if not 0 <= args.threads <= 1024:
        raise ConfigError(f"--threads is {args.threads}; use 1 to 1024", param="threads")
    if args.bench != "serve" and args.threads > len(os.sched_getaffinity(0)):
        raise ConfigError(
            f"--threads is {args.threads}, but this process may use {len(os.sched_getaffinity(0))} cores; figures of "
            "threads that share a core mean nothing",
            param="threads",
        )
    signal.signal(signal.SIGTERM, _stop)
    module = importlib.import_module(f"ai_engine.bench.{COMMANDS[args.bench][0]}")
    status: int = module.run(args)
    return status
