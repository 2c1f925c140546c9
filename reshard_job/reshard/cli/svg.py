"""Draw a tensor's boxes as SVG: source on the left, target on the right, one colour per file. Pure.

A tensor of more than two dims is drawn as a matrix: all dims but the last are its rows, as they lie in memory.
"""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from reshard.cli.explain import Explanation, Place
from reshard.cli.output import printable
from reshard.tensors.geometry import Box
from reshard.tensors.layout import LogicalTensor

MAX_TENSORS = 12
"""Most tensors in one picture; more would not be readable."""

_WIDTH, _GAP, _MARGIN, _TOP = 340, 110, 24, 46
_LEAST_HEIGHT, _MOST_HEIGHT = 48, 320
_LINE, _LEGEND = 16, 24
_MOST_RECTANGLES = 4000
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.small{font-size:10px;fill:#555}.name{font-weight:600}"
    ".box{fill:#fff;fill-opacity:0;stroke:#222;stroke-width:1}"
    ".label{font-size:10px;text-anchor:middle;dominant-baseline:central;pointer-events:none}"
)


class Rectangle(NamedTuple):
    """A part of the matrix view, in elements."""

    row: int
    column: int
    rows: int
    columns: int


def draw(explanations: Sequence[Explanation]) -> str:
    """Draw these tensors below each other, and return the SVG document.

    Source boxes have the colour of their file, and parts of target boxes that of the source file which they come from.
    Labels are those of the text (`S1`, `T1`). Pointing at a box shows its file and bytes. One complete copy of each
    side is drawn.
    """
    parts: list[str] = []
    top = float(_MARGIN)
    for item in explanations:
        part, height = _panel(item, top)
        parts += part
        top += height + _LINE
    width = 2 * _MARGIN + 2 * _WIDTH + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:.0f}" width="{width}" height="{top:.0f}">'
    )
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]
    )


def _panel(item: Explanation, top: float) -> tuple[list[str], float]:
    """Draw one tensor, its source and its first target; return the elements of the picture and their height."""
    rows, columns = matrix_shape(item.tensor.shape)
    height = min(_MOST_HEIGHT, max(_LEAST_HEIGHT, _WIDTH * rows / max(1, columns)))
    frame = top + _TOP - 12
    sources = _one_copy([place for place in item.places if place.used])
    colours = {file: _colour(at) for at, file in enumerate(dict.fromkeys(place.file for place in sources))}
    fills = {place.label: colours[place.file] for place in sources}
    parts = [
        _text(_MARGIN, top + 4, _title(item.tensor), "name"),
        _text(_MARGIN, top + 24, f"source: {item.source}{_more(item.places, sources)}"),
        *_side(item.tensor, sources, fills, (_MARGIN, frame), height),
        *_legend(sources, colours, _MARGIN, frame + height + 20),
    ]
    lines = len(colours)
    if item.target:
        kept = item.targets[0] if item.targets else None
        places = _one_copy(kept.places) if kept else []
        note = _more(kept.places, places) if kept else ": does not hold this tensor"
        right = _MARGIN + _WIDTH + _GAP
        parts.append(_text(right, top + 24, f"target: {item.target}{note}"))
        if kept:
            if len(item.targets) > 1 or kept.tensor != item.tensor:
                parts.append(_text(right, top + 4, _title(kept.tensor), "name"))
            parts += _side(kept.tensor, places, fills, (right, frame), height)
            parts.append(_text(right - _GAP / 2 - 8, frame + height / 2, "\N{RIGHTWARDS ARROW}"))
            parts += _legend(places, {}, right, frame + height + 20)
            lines = max(lines, len({place.file for place in places}))
    return parts, _TOP + height + 8 + _LINE * (min(lines, _LEGEND + 1) + 1)


def _side(
    tensor: LogicalTensor, places: Sequence[Place], fills: Mapping[str, str], corner: tuple[float, float], height: float
) -> list[str]:
    """Draw the tensor as a matrix; boxes of either side are framed and filled in the colour of the source file."""
    left, top = corner
    rows, columns = matrix_shape(tensor.shape)
    x_scale, y_scale = _WIDTH / max(1, columns), height / max(1, rows)
    parts: list[str] = []
    for place in places:
        tip = escape(printable(f"{place.label} {place.box}: {place.file}, bytes {place.start}:{place.stop}"))
        for label, box in place.origins or ((place.label, place.box),):
            for cut in rectangles(box, tensor.shape):
                area = _area(left, top, x_scale, y_scale, cut)
                parts.append(f'<rect class="part" {area} fill="{fills[label]}"/>')
        cuts = [*itertools.islice(rectangles(place.box, tensor.shape), _MOST_RECTANGLES)]
        parts += [
            f'<rect class="box" {_area(left, top, x_scale, y_scale, cut)}><title>{tip}</title></rect>' for cut in cuts
        ]
        largest = max(cuts, key=lambda cut: cut.rows * cut.columns)
        wide, high = largest.columns * x_scale, largest.rows * y_scale
        if wide >= 20 and high >= 11:
            x, y = left + largest.column * x_scale + wide / 2, top + largest.row * y_scale + high / 2
            parts.append(f'<text class="label" x="{x:.2f}" y="{y:.2f}">{place.label}</text>')
        if len(parts) > _MOST_RECTANGLES:
            parts.append(_text(left, top - 2, "(more boxes than can be drawn)", "small"))
            break
    return parts


def _area(left: float, top: float, x_scale: float, y_scale: float, cut: Rectangle) -> str:
    return (
        f'x="{left + cut.column * x_scale:.2f}" y="{top + cut.row * y_scale:.2f}"'
        f' width="{cut.columns * x_scale:.2f}" height="{cut.rows * y_scale:.2f}"'
    )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor's matrix view; a vector or a scalar has one row."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def rectangles(box: Box, shape: Sequence[int]) -> Iterator[Rectangle]:
    """Yield the box in the matrix view: one rectangle for each group of neighbouring rows."""
    if not shape or 0 in shape:
        yield Rectangle(0, 0, 1, 1)
        return
    column, columns = box.offset[-1], box.size[-1]
    dim = len(shape) - 1
    while dim > 1 and box.size[dim - 1] == shape[dim - 1]:
        dim -= 1
    if dim == 0:
        yield Rectangle(0, column, 1, columns)
        return
    inner = math.prod(shape[dim:-1])
    num_rows, start = box.size[dim - 1] * inner, box.offset[dim - 1] * inner
    starts = [0]
    for size, low, length in zip(shape[: dim - 1], box.offset[: dim - 1], box.size[: dim - 1], strict=True):
        starts = [base * size + low + step for base in starts for step in range(length)]
    for base in starts:
        yield Rectangle(base * shape[dim - 1] * inner + start, column, num_rows, columns)


def _one_copy(places: Sequence[Place]) -> list[Place]:
    least = min((place.copy for place in places), default=0)
    return [place for place in places if place.copy == least]


def _more(places: Sequence[Place], drawn: Sequence[Place]) -> str:
    others = len({place.copy for place in places}) - len({place.copy for place in drawn})
    return f", one of {others + 1} copies" if others > 0 else ""


def _legend(places: Sequence[Place], colours: Mapping[str, str], left: float, top: float) -> list[str]:
    """Draw which boxes lie in which file, with the colours of source files."""
    parts = []
    labels: dict[str, list[str]] = {}
    for place in places:
        labels.setdefault(place.file, []).append(place.label)
    for at, (file, labels_of_file) in enumerate(itertools.islice(labels.items(), _LEGEND)):
        y = top + at * _LINE
        if file in colours:
            parts.append(f'<rect x="{left - 14:.2f}" y="{y - 9:.2f}" width="10" height="10" fill="{colours[file]}"/>')
        short = (
            ", ".join(labels_of_file)
            if len(labels_of_file) <= 3
            else f"{labels_of_file[0]}, {labels_of_file[1]} ... {labels_of_file[-1]}"
        )
        parts.append(_text(left, y, f"{short}: {file}", "small"))
    if len(labels) > _LEGEND:
        parts.append(_text(left, top + _LEGEND * _LINE, f"and {len(labels) - _LEGEND} more files", "small"))
    return parts


def _title(tensor: LogicalTensor) -> str:
    return f"{tensor.key}  {list(tensor.shape)} {tensor.dtype}"


def _colour(number: int) -> str:
    """Return a colour in hex, which every viewer of SVG knows; neighbouring numbers get distant hues (golden angle)."""
    red, green, blue = colorsys.hls_to_rgb(number * 137.508 % 360 / 360, (0.78, 0.68)[number // 8 % 2], 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.2f}" y="{y:.2f}"{style}>{escape(printable(text))}</text>'
