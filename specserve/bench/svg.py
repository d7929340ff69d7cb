"""Small charts as SVG text, without a drawing library: dots on labelled lines, and dots or lines over two axes.

No background is drawn and all colours are middle tones, so that a chart can be read on light and on dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

INK: Final = "#7d8590"
BLUE, ORANGE, RED, GREEN, VIOLET = "#4c8dd6", "#e08a3c", "#d0545f", "#4ea56b", "#9a6dd7"

_WIDTH, _LINE = 720, 24
_FONT = "font-family='system-ui, sans-serif' font-size='13'"


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from low to high, with marks at `ticks`; logarithmic where wanted."""

    name: str
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value stands, 0 to 1; values beyond the ends stand at the ends."""
        low, high, value = (
            math.log10(v) if self.logarithmic else v for v in (self.low, self.high, max(value, self.low))
        )
        return min(1.0, (value - low) / (high - low))

    def label(self, tick: float) -> str:
        """A tick in words."""
        power = round(math.log10(tick)) if self.logarithmic else 0
        return f"10{_raised(power)}" if power < -2 else f"{tick:g}"


def _raised(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


@dataclass(frozen=True, slots=True)
class Line:
    """A labelled line of dots: (value, colour) each."""

    label: str
    dots: Sequence[tuple[float, str]]


def dot_lines(title: str, axis: Axis, lines: Sequence[Line], key: Sequence[tuple[str, str]] = ()) -> str:
    """A chart with a line of dots for each label; key: (colour, meaning)."""
    left, top = 350, 60
    bottom = top + _LINE * len(lines)
    parts = [_ticks_below(axis, left, _WIDTH - 30, top - 8, bottom)]
    for row, line in enumerate(lines):
        y = top + _LINE * row + _LINE / 2
        parts.append(_text(left - 14, y + 4, line.label, "end"))
        parts.append(f"<path d='M{left} {y}H{_WIDTH - 30}' stroke='{INK}' stroke-opacity='.2'/>")
        parts += [_dot(left + axis.place(value) * (_WIDTH - 30 - left), y, 5, colour) for value, colour in line.dots]
    return _document(title, parts, bottom + 48, key)


def scatter(
    title: str, across: Axis, up: Axis, dots: Sequence[tuple[float, float, str]], key: Sequence[tuple[str, str]] = ()
) -> str:
    """A chart of (x, y, colour) dots; the name of the axis upwards stands above it."""
    parts = [_dot(*_point(across, up, x, y), 3, colour) for x, y, colour in dots]
    return _document(title, [*_plane(across, up), *parts], _TOP + _HEIGHT + 48, key)


@dataclass(frozen=True, slots=True)
class Curve:
    """(x, y) points, in order of x, of one colour."""

    points: Sequence[tuple[float, float]]
    colour: str


def curves(title: str, across: Axis, up: Axis, lines: Sequence[Curve], key: Sequence[tuple[str, str]] = ()) -> str:
    """A chart of lines with a dot at each point; axes as in `scatter`."""
    parts = list(_plane(across, up))
    for line in lines:
        points = [_point(across, up, x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f"<path d='M{path}' stroke='{line.colour}' stroke-width='2' fill='none'/>")
        parts += [_dot(x, y, 3, line.colour) for x, y in points]
    return _document(title, parts, _TOP + _HEIGHT + 48, key)


_LEFT, _TOP, _RIGHT, _HEIGHT = 70, 84, _WIDTH - 30, 260


def _plane(across: Axis, up: Axis) -> list[str]:
    """Both axes with their ticks."""
    parts = [_ticks_below(across, _LEFT, _RIGHT, _TOP, _TOP + _HEIGHT), _text(20, _TOP - 16, up.name, "start")]
    for tick in up.ticks:
        _, y = _point(across, up, 0, tick)
        parts.append(f"<path d='M{_LEFT} {y:.1f}H{_RIGHT}' stroke='{INK}' stroke-opacity='.35'/>")
        parts.append(_text(_LEFT - 8, y + 4, up.label(tick), "end"))
    return parts


def _point(across: Axis, up: Axis, x: float, y: float) -> tuple[float, float]:
    return _LEFT + (_RIGHT - _LEFT) * across.place(x), _TOP + _HEIGHT * (1 - up.place(y))


def _ticks_below(axis: Axis, left: float, right: float, top: float, bottom: float) -> str:
    parts = []
    for tick in axis.ticks:
        x = left + axis.place(tick) * (right - left)
        parts.append(f"<path d='M{x:.1f} {top}V{bottom}' stroke='{INK}' stroke-opacity='.35'/>")
        parts.append(_text(x, bottom + 18, axis.label(tick), "middle"))
    parts.append(_text((left + right) / 2, bottom + 38, axis.name, "middle"))
    return "".join(parts)


def _dot(x: float, y: float, radius: float, colour: str) -> str:
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{colour}' fill-opacity='.8'/>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"


def _document(title: str, parts: Sequence[str], height: float, key: Sequence[tuple[str, str]]) -> str:
    head = [f"<text x='20' y='22' font-size='15' font-weight='600'>{escape(title)}</text>"]
    x = 20.0
    for colour, meaning in key:
        head += [_dot(x + 5, 40, 5, colour), _text(x + 16, 44, meaning, "start")]
        x += 40 + 7 * len(meaning)
    box = f"viewBox='0 0 {_WIDTH} {height:.0f}' width='{_WIDTH}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {box} {_FONT} fill='{INK}'>"
        f"<title>{escape(title)}</title>{''.join(head)}{''.join(parts)}</svg>\n"
    )
