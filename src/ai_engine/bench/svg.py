"""Plots as SVG text: ratios with intervals, lines (latency curves, time lines), the roofline. No dependency.

Owns how they look: one file each, in colours that can be read on light and on dark pages alike, without a background.
Takes plain numbers; does not compute statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 48, 56
LEGEND = 132
STYLE = """<style>
 text { font: 13px system-ui, sans-serif; fill: #767e88 } .title { font-size: 15px; font-weight: 600 }
 .axis { stroke: #767e88; stroke-width: 1 } .grid { stroke: #8c959f; stroke-width: .5; stroke-dasharray: 2 4 }
 .c0 { stroke: #2f81f7 } .c1 { stroke: #db6d28 } .c2 { stroke: #2da44e } .c3 { stroke: #8957e5 } .c4 { stroke: #bf8700 }
 .f0 { fill: #2f81f7 } .f2 { fill: #2da44e }
 .line { fill: none; stroke-width: 2 } .mark { stroke: #767e88; stroke-width: 1.5 } .dashed { stroke-dasharray: 5 3 }
</style>"""
COLOURS = 5


@dataclass(frozen=True)
class Series:
    """A named curve: xs and ys of the same length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """A ratio with its interval; ``aim`` draws a mark at what is asked for."""

    label: str
    value: float
    low: float
    high: float
    aim: float | None = None


def document(parts: Sequence[str], title: str, height: int = HEIGHT) -> str:
    """A whole SVG file."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        f' role="img" aria-label="{attr(title)}">',
        STYLE, text(WIDTH / 2, 26, title, "middle", "title"), *parts, "</svg>",
    ]) + "\n"  # fmt: skip


def attr(value: str) -> str:
    return escape(value, {'"': "&quot;"})


def text(x: float, y: float, content: str, anchor: str = "start", cls: str = "", turn: float = 0) -> str:
    turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    named = f' class="{cls}"' if cls else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turned}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{cls}"/>'


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) that cover low..high."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within low..high, and 2 and 5 times them where that leaves fewer than eight."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    chosen = [t for t in fine if low <= t * 1.000001 and t <= high * 1.000001]
    return chosen if len(chosen) <= 8 else [t for t in chosen if math.isclose(math.log10(t), round(math.log10(t)))]


class Axes:
    """Maps data to the picture and draws the frame. ``right`` is the margin there."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        log: tuple[bool, bool] = (False, False),
        right: float = RIGHT,
    ) -> None:
        self.x, self.y, self.log, self.end = x, y, log, WIDTH - right

    def at(self, x: float, y: float) -> tuple[float, float]:
        def place(v: float, span: tuple[float, float], log: bool) -> float:
            change: Callable[[float], float] = math.log10 if log else float
            low, high = change(span[0]), change(span[1])
            return (change(min(max(v, span[0]), span[1])) - low) / ((high - low) or 1.0)

        return (
            LEFT + place(x, self.x, self.log[0]) * (self.end - LEFT),
            HEIGHT - BOTTOM - place(y, self.y, self.log[1]) * (HEIGHT - TOP - BOTTOM),
        )

    def frame(self, x_label: str, y_label: str) -> list[str]:
        parts = []
        for value in log_ticks(*self.x) if self.log[0] else ticks(*self.x):
            px, _ = self.at(value, self.y[0])
            parts += [
                line(px, TOP, px, HEIGHT - BOTTOM, "grid"),
                text(px, HEIGHT - BOTTOM + 18, f"{value:g}", "middle"),
            ]
        for value in log_ticks(*self.y) if self.log[1] else ticks(*self.y):
            _, py = self.at(self.x[0], value)
            parts += [line(LEFT, py, self.end, py, "grid"), text(LEFT - 8, py + 4, f"{value:g}", "end")]
        return [
            *parts,
            line(LEFT, HEIGHT - BOTTOM, self.end, HEIGHT - BOTTOM, "axis"),
            line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "axis"),
            text((LEFT + self.end) / 2, HEIGHT - 14, x_label, "middle"),
            text(20, (TOP + HEIGHT - BOTTOM) / 2, y_label, "middle", turn=-90),
        ]


def lines(title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_x: bool = False) -> str:
    """Curves with a legend. Points at or below zero are left out of a logarithmic axis."""
    kept = []
    for one in series:
        points = [(x, y) for x, y in zip(one.xs, one.ys, strict=True) if not log_x or x > 0]
        if points:
            kept.append((one.name, points))
    if not kept:
        return document([text(WIDTH / 2, HEIGHT / 2, "nothing was measured", "middle")], title)
    xs, ys = ([p[i] for _, points in kept for p in points] for i in (0, 1))
    low_x = min(xs) if log_x else min(0.0, *xs)
    axes = Axes(
        (low_x, max(*xs, low_x * 1.01 + 1e-9)), (min(0.0, *ys), max(*ys, 1e-9)), log=(log_x, False), right=LEGEND
    )
    parts = axes.frame(x_label, y_label)
    for i, (name, points) in enumerate(kept):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (axes.at(*p) for p in points))
        parts.append(f'<polyline points="{path}" class="{curve(i)}"/>')
        parts += legend(i, name)
    return document(parts, title)


def curve(i: int) -> str:
    """The class of curve ``i``: five colours, then the same dashed."""
    return f"line c{i % COLOURS}" + (" dashed" if i // COLOURS % 2 else "")


def legend(i: int, name: str) -> list[str]:
    """To the right of the frame, from the top."""
    y, start = TOP + 12 + 20 * i, WIDTH - LEGEND + 12
    return [line(start, y - 4, start + 22, y - 4, curve(i)), text(start + 28, y, name)]


def bars(title: str, x_label: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from 0 with their intervals; a line at 1, where both sides are equal."""
    step, wide = 34, 210
    height = TOP + step * len(rows) + BOTTOM
    top = max([1.0, *(bar.high for bar in rows), *(bar.aim or 0 for bar in rows)]) * 1.12

    def px(value: float) -> float:
        return wide + value / top * (WIDTH - wide - RIGHT)

    end = TOP + step * len(rows)
    parts = []
    for value in ticks(0, top):
        parts += [line(px(value), TOP, px(value), end, "grid"), text(px(value), end + 18, f"{value:g}", "middle")]
    parts += [line(px(1), TOP, px(1), end, "axis"), text((wide + WIDTH - RIGHT) / 2, height - 12, x_label, "middle")]
    for i, bar in enumerate(rows):
        y = TOP + step * i + 6
        middle = y + 11
        parts += [
            text(wide - 10, middle + 4, bar.label, "end"),
            f'<rect x="{wide}" y="{y}" width="{max(0.0, px(bar.value) - wide):.1f}" height="22" rx="2" class="f0" '
            'opacity=".75"/>',
            line(px(bar.low), middle, px(bar.high), middle, "mark"),
            line(px(bar.low), middle - 5, px(bar.low), middle + 5, "mark"),
            line(px(bar.high), middle - 5, px(bar.high), middle + 5, "mark"),
            text(min(px(bar.high) + 6, WIDTH - 40), middle + 4, f"{bar.value:.2f}"),
        ]
        if bar.aim is not None:
            parts.append(line(px(bar.aim), y - 2, px(bar.aim), y + 24, "line c1"))
    return document(parts, title, height)


def roofline(read_gb_s: float, fma_gflop_s: float, dot_gop_s: float, points: Sequence[tuple[str, float, float]]) -> str:
    """Operations a second over operations per byte, both logarithmic. ``points``: (name, operations per byte of
    memory, 10^9 operations a second)."""
    low, high = 0.25, 4096.0
    floor = min([read_gb_s * low, *(p[2] for p in points)]) / 1.5
    axes = Axes((low, high), (floor, max(fma_gflop_s, dot_gop_s) * 2), log=(True, True))
    parts = axes.frame("operations per byte read from memory", "10^9 operations a second")
    for i, (name, top) in enumerate((("int8 dot", dot_gop_s), ("f32 FMA", fma_gflop_s))):
        ridge = min(max(top / read_gb_s, low), high)
        path = [axes.at(low, read_gb_s * low), axes.at(ridge, top), axes.at(high, top)]
        parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in path)}" class="line c{i}"/>')
        x, y = axes.at(high, top)
        parts.append(text(x - 6, y - 6, f"{name} {top:.0f}", "end"))
    x, y = axes.at(1.0, read_gb_s)
    parts.append(text(x - 10, y - 10, f"{read_gb_s:.1f} GB/s", "end"))
    taken: list[tuple[float, float]] = []
    for name, intensity, rate in sorted(points, key=lambda point: point[1]):
        x, y = axes.at(intensity, rate)
        wide = 7.5 * len(name)
        left = x + wide + 12 > WIDTH
        at = y + 18
        while any(abs(at - other_y) < 14 and abs(x - other_x) < wide + 16 for other_x, other_y in taken):
            at += 15
        taken.append((x, at))
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" class="f2"/>',
            text(x - 6 if left else x + 6, at, name, "end" if left else "start"),
        ]
    return document(parts, "Roofline")
