"""Curves as SVG, which an HTML page holds without other files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 260, 56, 14, 34
COLORS = ("#3465a4", "#cc4a22", "#4e9a06")
POINTS = 400  # of a curve, at most

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A named curve of (x, y) points."""

    name: str
    points: Points


def chart(curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """An SVG picture of the finite points of curves; a text where there is none."""
    drawn = [Curve(curve.name, [point for point in curve.points if math.isfinite(point[1])]) for curve in curves]
    drawn = [curve for curve in drawn if curve.points]
    if not drawn:
        return "<p>no points yet</p>"
    xs = [x for curve in drawn for x, _ in curve.points]
    ys = [y for curve in drawn for _, y in curve.points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_low, y_high = _round_range(min(ys), max(ys))

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - 12)
        down = TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    pieces = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">']
    for number in range(5):
        y = y_low + (y_high - y_low) * number / 4
        across, down = place(x_low, y).split(",")
        pieces.append(f'<line x1="{across}" y1="{down}" x2="{WIDTH - 12}" y2="{down}" stroke="#ddd"/>')
        pieces.append(f'<text x="{LEFT - 6}" y="{float(down) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for x, anchor in ((x_low, "start"), (x_high, "end")):
        across, _ = place(x, y_low).split(",")
        pieces.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{x:g}</text>')
    pieces.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    for number, curve in enumerate(drawn):
        color, step = COLORS[number % len(COLORS)], -(-len(curve.points) // POINTS)
        places = " ".join(place(x, y) for x, y in [*curve.points[::step], curve.points[-1]])
        pieces.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        pieces.append(f'<text x="{WIDTH - 16}" y="{TOP + 14 + 16 * number}" text-anchor="end" style="fill:{color}">')
        pieces.append(f"{escape(curve.name)}</text>")
    return "".join([*pieces, "</svg>"])


def _round_range(low: float, high: float) -> tuple[float, float]:
    """A range of round numbers around [low, high]."""
    step = 10 ** math.floor(math.log10(max(high - low, abs(high) * 1e-3, 1e-9)))
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    return (low, high) if high > low else (low, low + step)
