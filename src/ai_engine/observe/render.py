"""Traces as text for a terminal: `ai-engine trace show`, `top` and `diff`.

Owns the layout. Figures are those of the JSON; times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ai_engine.observe.traces import Tree

BAR = 30
SHOWN_STEPS = 12


def chosen_step(request: Tree) -> int | None:
    """The step to open when nobody names one: the longest decode step, or the longest of all."""
    steps = [step for step in request["steps"] if step["part"] == "decode"] or request["steps"]
    return max(steps, key=lambda step: float(step["seconds"]))["step"] if steps else None


def table(summaries: Iterable[Tree]) -> str:
    """Recent requests, one a line."""
    rows = (
        f"{row['trace_id']}  {_ms(row['seconds']):>12} ms  {row['status']}  {row['route']}  {row['key']}".rstrip()
        + "\n"
        for row in summaries
    )
    return "".join(rows)


def show(trace: Tree) -> str:
    """The tree: parts, steps, and the layers and ops of the steps that the trace shows."""
    lines = [line for request in trace["requests"] for line in _request(request)]
    if isinstance(trace.get("roofline"), str):
        lines.append(f"shares of the machine's ceilings: {trace['roofline']}")
    return "\n".join(lines) + "\n"


def _request(request: Tree) -> Iterator[str]:
    said, seconds = request["attributes"], request["seconds"]
    yield f"trace {request['trace_id']}"
    yield (
        f"{request['route']} {said.get('gen_ai.request.model', '')}  status {request['status']}  {_ms(seconds)} ms  "
        f"{said.get('gen_ai.usage.input_tokens', '?')} tokens in, {said.get('gen_ai.usage.output_tokens', '?')} out"
        + (f"  key {request['key']}" if request["key"] else "")
    )
    for part in request["parts"]:
        busy = part["seconds"] / seconds if seconds else 0.0
        times = f"  x{part['count']}" if part["count"] > 1 else ""
        yield f"|- {part['name']:<12}{_ms(part['seconds']):>10} ms {busy:6.1%}  {_bar(request, part)}{times}"
    yield f"|  sum         {_ms(request['parts_seconds']):>10} ms, end to end {_ms(seconds)} ms"
    for choice in request["choices"]:
        gap = choice["max_gap_seconds"]
        first = choice["ttft_seconds"]
        yield (
            f"|- choice {choice['index']}: {choice['finish']}, {choice['prompt_tokens']} prompt tokens of which "
            f"{choice['cached_tokens']} cached, {choice['completion_tokens']} out; first token after "
            f"{'-' if first is None else _ms(first)} ms, longest gap {'-' if gap is None else _ms(gap)} ms"
        )
    yield from _steps(request)
    yield from ("   " + line for line in _op_table(request["ops"][:12]))


def _bar(request: Tree, part: Tree) -> str:
    """Where in the request the part lies."""
    total = request["seconds"] or 1.0
    first, last = int(part["at"] / total * BAR), int(part["until"] / total * BAR)
    first = min(max(first, 0), BAR - 1)
    return "." * first + "#" * max(1, min(last, BAR) - first) + "." * (BAR - max(last, first + 1))


def _steps(request: Tree) -> Iterator[str]:
    steps = request["steps"]
    if not steps:
        yield "|- no steps are kept of this request"
        return
    total = sum(step["seconds"] for step in steps)
    shared = sum(step["seconds"] * step["share"] for step in steps)
    yield f"`- {len(steps)} steps, {_ms(total)} ms; by rows its share is {_ms(shared)} ms"
    longest = {step["step"] for step in sorted(steps, key=lambda step: -step["seconds"])[:SHOWN_STEPS]}
    hidden = 0
    for step in steps:
        if step["step"] in longest or step.get("runs"):
            yield from _hidden(hidden)
            hidden = 0
            yield from _step(step)
        else:
            hidden += 1
    yield from _hidden(hidden)


def _hidden(count: int) -> Iterator[str]:
    if count:
        yield f"   |  ({count} shorter steps)"


def _step(step: Tree) -> Iterator[str]:
    rows = ", ".join(f"{count} {name}" for name, count in step["rows"].items() if count)
    kernels = step["kernel_seconds"]
    inside = "stamps gone" if kernels is None else f"kernels {_ms(kernels)} + host {_ms(step['host_seconds'])}"
    others = sorted({link["trace_id"][:8] for link in step["links"]})
    yield (
        f"   |- step {step['step']} {step['part']} {_ms(step['seconds'])} ms ({inside})  {rows} of {step['all_rows']} "
        f"rows = share {step['share']:.0%}; context {step['context']}; serves {' '.join(others)}"
    )
    for run in step.get("runs", ()):
        for layer in run:
            name = "around the layers" if layer["layer"] < 0 else f"layer {layer['layer']}"
            yield f"   |  |- {name} {_ms(layer['seconds'])} ms"
            for op in layer["ops"]:
                yield (
                    f"   |  |  |- {op['slot']:>4} {op['op']:<12} {op['shape']:<20} {op['dtype']:<5} {op['device']} "
                    f"{op['seconds'] * 1e6:>8.1f} us {_rate(op['gb_per_s'])} GB/s {_rate(op['gflop_per_s'])} GFLOP/s"
                    f"{_ceiling(op)} {' '.join(op['weights'][:1])}".rstrip()
                )


def _ceiling(op: Tree) -> str:
    """The share of the machine's memory rate and of its arithmetic rate that the op reached, if those are known."""
    memory, arithmetic = op.get("memory_share"), op.get("arithmetic_share")
    return (
        "" if memory is None or arithmetic is None else f" {memory:>4.0%} of memory, {arithmetic:>4.0%} of arithmetic"
    )


def _op_table(rows: Sequence[Tree]) -> Iterator[str]:
    if rows:
        yield f"{'op':<12} {'shape':<22} {'dtype':<6} {'count':>7} {'ms':>9} {'share ms':>9} {'GB/s':>7} {'GFLOP/s':>8}"
    for row in rows:
        yield (
            f"{row['op']:<12} {row['shape']:<22} {row['dtype']:<6} {row['count']:>7} {_ms(row['seconds']):>9} "
            f"{_ms(row['share_seconds']):>9} {_rate(row['gb_per_s'])} {_rate(row['gflop_per_s']):>8}{_ceiling(row)}"
        )


def top(trace: Tree) -> str:
    """The ops of a trace, longest first."""
    return "\n".join(line for request in trace["requests"] for line in _op_table(request["ops"])) + "\n"


def diff(first: Tree, second: Tree) -> str:
    """Two traces side by side: parts, then ops, by how much they differ."""
    a, b = first["requests"][0], second["requests"][0]
    lines = [f"{'':<44} {'A ms':>10} {'B ms':>10} {'B - A':>10}"]
    lines.append(_pair("end to end", a["seconds"], b["seconds"]))
    for kind in ("parts", "ops"):
        ours, theirs = _by_name(a[kind]), _by_name(b[kind])
        names = sorted({*ours, *theirs}, key=lambda name: -abs(theirs.get(name, 0.0) - ours.get(name, 0.0)))
        lines.append(f"{kind}:")
        lines += [_pair(f"  {name}", ours.get(name, 0.0), theirs.get(name, 0.0)) for name in names]
    for name in ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens"):
        lines.append(f"{name:<44} {a['attributes'].get(name, '-')!s:>10} {b['attributes'].get(name, '-')!s:>10}")
    lines.append(f"{'steps':<44} {len(a['steps']):>10} {len(b['steps']):>10}")
    rows = [sum(step["all_rows"] for step in request["steps"]) / max(1, len(request["steps"])) for request in (a, b)]
    lines.append(f"{'rows of a step, on average':<44} {rows[0]:>10.1f} {rows[1]:>10.1f}")
    return "\n".join(lines) + "\n"


def _by_name(rows: Iterable[Tree]) -> dict[str, float]:
    return {
        row["name"] if "name" in row else f"{row['op']} {row['shape']} {row['dtype']}": row["seconds"] for row in rows
    }


def _pair(name: str, a: float, b: float) -> str:
    return f"{name:<44} {_ms(a):>10} {_ms(b):>10} {(b - a) * 1e3:>+10.3f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _rate(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:>7.2f}"
