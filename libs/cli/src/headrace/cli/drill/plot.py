"""Line charts as SVG, without a library.

Knows: panels one above the other with a common time axis, lines, marks. Does not know what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, GAP, TOP = 960, 220, 70, 150, 44, 34  # of the page, a panel, margins; pixels
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8a5a00", "#6a4c93", "#00798c", "#a23b72", "#555555")


@dataclass
class Panel:
    """`lines`: name -> [(x, y)]. `marks`: x of events, drawn as thin vertical lines."""

    title: str
    unit: str
    lines: dict[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    marks: Sequence[float] = ()


def svg(title: str, panels: Sequence[Panel], x_label: str) -> str:
    """A whole SVG document."""
    height = TOP + len(panels) * (HEIGHT + GAP)
    far = max((x for p in panels for line in p.lines.values() for x, _ in line), default=1.0) or 1.0
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        out += _panel(panel, TOP + number * (HEIGHT + GAP), far, x_label)
    return "\n".join([*out, "</svg>\n"])


def _panel(panel: Panel, top: float, far: float, x_label: str) -> list[str]:
    most = 1.08 * max((y for line in panel.lines.values() for _, y in line), default=1.0) or 1.0
    width, bottom = WIDTH - LEFT - RIGHT, top + HEIGHT
    out = [
        f'<text x="{LEFT}" y="{top + 12}">{escape(panel.title)}</text>',
        f'<rect x="{LEFT}" y="{top + 18}" width="{width}" height="{HEIGHT - 18}" fill="none" stroke="#999"/>',
    ]

    def at(x: float, y: float) -> str:
        return f"{LEFT + x / far * width:.1f},{bottom - y / most * (HEIGHT - 18):.1f}"

    for step in range(5):
        value, y = most * step / 4, bottom - (HEIGHT - 18) * step / 4
        out.append(_text(LEFT - 6, y + 4, "end", f"{value:.3g} {panel.unit}"))
        out.append(_text(LEFT + width * step / 4, bottom + 14, "middle", f"{far * step / 4:.3g} {x_label}"))
    for x in panel.marks:
        spot = f"{LEFT + x / far * width:.1f}"
        out.append(f'<path d="M{spot},{bottom - 5} V{bottom}" stroke="#d1495b" stroke-width="0.6"/>')
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(at(x, y) for x, y in line)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        out.append(_text(WIDTH - RIGHT + 8, top + 30 + 15 * number, "start", name, colour))
    return out


def _text(x: float, y: float, anchor: str, text: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
