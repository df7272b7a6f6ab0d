"""`ai-engine trace`: its words and options, and what each does.

Owns the command's arguments and files. Layout is render.py's, formats are otlp.py's and perfetto.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

ENDINGS: Final = {"perfetto": "pftrace", "otlp": "otlp.pb", "json": "json"}


def add_trace(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="list|show|top|diff|export", required=True)
    lists = what.add_parser("list", help="recent requests")
    show = what.add_parser("show", help="a request's tree, with the ops of one step")
    top = what.add_parser("top", help="a request's ops, longest first")
    diff = what.add_parser("diff", help="two requests side by side")
    export = what.add_parser("export", help="write a trace as a file")
    for sub in (lists, show, top, diff, export):
        sub.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
        sub.add_argument("--key", default="", help="API key (or $AI_ENGINE_API_KEY)")
    for sub in (show, top, diff, export):
        sub.add_argument("trace", help="a trace id (the response header x-ai-trace-id) or a file of `trace export`")
    diff.add_argument("other", help="the trace to compare with")
    for sub, default in ((show, ""), (export, "all")):
        sub.add_argument("--step", default=default, help="steps to open: numbers with commas, all, or none")
    export.add_argument("--format", choices=tuple(ENDINGS), default="perfetto", help="what to write")
    export.add_argument("--out", default="", metavar="FILE", help="where to (default: the trace id and its ending)")


def add_slo(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="check", required=True)
    text = "say of each objective whether it is met, missed or inconclusive; exit status 0, 1 or 3"
    check = what.add_parser("check", help=text, description=text)
    check.add_argument(
        "file", help="objectives, TOML: [[objective]] name, signal, percentile, threshold_s or max_ratio"
    )
    check.add_argument("--log", default="", metavar="FILE", help="judge the requests of this log (JSON lines)")
    check.add_argument("--url", default="http://127.0.0.1:8000", help="or ask a server that runs with --slo FILE")
    check.add_argument("--key", default="", help="API key (or $AI_ENGINE_API_KEY)")


def run_slo(args: argparse.Namespace) -> int:
    """Raises ConfigError where the file, the log or the server is not as it should be."""
    from ai_engine.observe import client, slo

    wanted = slo.read_slo(Path(args.file))
    if args.log:
        results = slo.check(wanted, slo.read_records(Path(args.log)))
        sys.stdout.write(slo.report(results))
        return slo.EXIT_STATUS[slo.worst(results)]
    states = client.slo_states(args.url, args.key or os.environ.get("AI_ENGINE_API_KEY", ""), wanted)
    sys.stdout.write("".join(f"{verdict:<13}{name}: burn rate {burn:.2f}\n" for name, verdict, burn in states))
    verdicts = {verdict for _, verdict, _ in states}
    return max(slo.EXIT_STATUS[v] for v in verdicts) if "missed" not in verdicts else slo.EXIT_STATUS["missed"]


def run_trace(args: argparse.Namespace) -> int:
    """Raises ConfigError where the server or the file does not give the trace."""
    from ai_engine.observe import client, render

    key = args.key or os.environ.get("AI_ENGINE_API_KEY", "")
    if args.what == "list":
        text = render.table(client.fetch(args.url, key, "/traces")["data"])
    else:
        trace = client.load(args.trace, args.url, key, getattr(args, "step", "none"))
        if args.what == "show":
            text = render.show(trace)
        elif args.what == "top":
            text = render.top(trace)
        elif args.what == "diff":
            text = render.diff(trace, client.load(args.other, args.url, key, "none"))
        else:
            text = f"{write_trace(trace, args.format, args.out)}\n"
    sys.stdout.write(text)
    return 0


def write_trace(trace: dict[str, Any], form: str, out: str) -> Path:
    """The file's path."""
    from ai_engine.observe import otlp, perfetto

    path = Path(out or f"{trace['trace_id']}.{ENDINGS[form]}")
    if form == "json":
        path.write_text(json.dumps(trace), encoding="utf-8")
    elif form == "perfetto":
        path.write_bytes(perfetto.encode(trace))
    else:
        spans = [span for request in trace["requests"] for span in otlp.spans_of(request)]
        path.write_bytes(otlp.encode(spans, {"service.name": "ai_engine"}))
    return path
