"""A curve of losses, in a terminal or as a picture.

In: one loss a step, and a step to mark.  Out: text, or an SVG file's content.
Promise: needs no plotting package; a NaN or an infinite loss is left out.
Not here: files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

WIDTH, HEIGHT = 66, 14  # of the text, in characters: fits 80 columns with the axis
SVG_WIDTH, SVG_HEIGHT, MARGIN = 720, 320, 40


def bounds(losses: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest loss, never equal."""
    finite = [loss for loss in losses if math.isfinite(loss)] or [0.0]
    low, high = min(finite), max(finite)
    return low, high if high > low else low + 1.0


def text_plot(losses: Sequence[float], *, mark: int) -> str:
    """Each column is the mean of the steps that fall into it; `:` is the marked step."""
    width = min(WIDTH, len(losses))
    edges = [len(losses) * column // width for column in range(width + 1)]
    means = [sum(losses[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    low, high = bounds(means)
    marked = mark * width // len(losses)
    rows = [[":" if column == marked else " " for column in range(width)] for _ in range(HEIGHT)]
    for column, mean in enumerate(means):
        if math.isfinite(mean):
            rows[round((high - mean) / (high - low) * (HEIGHT - 1))][column] = "*"
    names = {0: f"{high:.2f}", HEIGHT - 1: f"{low:.2f}"}
    lines = [f"{names.get(n, ''):>8} |{''.join(row)}" for n, row in enumerate(rows)]
    return "\n".join([*lines, f"{'':8} +{'-' * width}", f"{'':9} step 0 to {len(losses) - 1}"])


def svg_plot(losses: Sequence[float], *, mark: int) -> str:
    """Every step; a dashed line at the marked one."""
    low, high = bounds(losses)

    def x(step: int) -> float:
        return MARGIN + step / max(1, len(losses) - 1) * (SVG_WIDTH - 2 * MARGIN)

    def y(loss: float) -> float:
        return MARGIN + (high - loss) / (high - low) * (SVG_HEIGHT - 2 * MARGIN)

    finite = [(step, loss) for step, loss in enumerate(losses) if math.isfinite(loss)]
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in finite)
    top, bottom = MARGIN, SVG_HEIGHT - MARGIN
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SVG_WIDTH} {SVG_HEIGHT}">
<rect width="100%" height="100%" fill="white"/>
<path d="M{x(mark):.1f} {top}V{bottom}" stroke="gray" stroke-dasharray="4"/>
<polyline points="{points}" fill="none" stroke="steelblue" stroke-width="1.5"/>
<g font-family="sans-serif" font-size="12">
<text x="4" y="{top + 4}">{high:.2f}</text>
<text x="4" y="{bottom + 4}">{low:.2f}</text>
<text x="{x(mark):.1f}" y="{top - 8}" text-anchor="middle">other weights from step {mark}</text>
<text x="{SVG_WIDTH / 2}" y="{SVG_HEIGHT - 12}" text-anchor="middle">step</text>
</g>
</svg>
"""
