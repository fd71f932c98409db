"""Figures of a report, as SVG that stands in a page: it takes the page's text colour, font and width."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = ("#3f7fca", "#d97a21", "#2f9e73", "#b2599f", "#93842f", "#c8453f", "#5f6bd0", "#3b9cab")
"""Colours of labelers, in the order of the study: of middling lightness, so that they show on white and on black."""

INK = "#010203"
"""Stands for the page's text colour until the figure is written."""

_RC: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Curve:
    """Values over training steps, one row a seed. steps: [T]. values: [seeds, T]."""

    steps: np.ndarray
    values: np.ndarray


def scores(by_labeler: Mapping[str, Sequence[float]], unit: str, baseline: float | None, key: str) -> str:
    """A point a seed, and mean with sample standard deviation, for each labeler; a line for the data's own mean."""
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(7.2, 0.8 + 0.42 * len(by_labeler)), layout="constrained")
        axes = figure.subplots()
        for row, values in enumerate(by_labeler.values()):
            colour = PALETTE[row % len(PALETTE)]
            axes.plot(values, [row] * len(values), "o", color=colour, alpha=0.45, markersize=5)
            if values:
                spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                axes.errorbar([np.mean(values)], [row], xerr=[spread], fmt="|", color=colour, capsize=4, markersize=14)
        if baseline is not None:
            axes.axvline(baseline, color=INK, linestyle=":", linewidth=1)
            axes.text(baseline, -0.62, " mean of the data", fontsize=8, va="center")
        axes.set_yticks(range(len(by_labeler)), list(by_labeler))
        axes.set_ylim(len(by_labeler) - 0.4, -0.9)
        axes.set_xlabel(f"{unit} (point: a seed; bar: mean ± sample standard deviation)")
        axes.grid(axis="y", visible=False)
        return _svg(figure, key)


def curves(panels: Mapping[str, Mapping[str, Curve]], colours: Mapping[str, str], key: str) -> str:
    """One panel for each quantity, one line for each labeler: the mean over seeds, with their range."""
    with matplotlib.rc_context(_RC):
        columns = min(len(panels), 3)
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(3.1 * columns + 0.6, 2.3 * rows + 0.3), layout="constrained")
        for axes, (quantity, lines) in zip(_panels(figure, rows, columns), panels.items(), strict=False):
            for labeler, curve in lines.items():
                axes.plot(curve.steps, curve.values.mean(0), color=colours[labeler], label=labeler)
                low, high = curve.values.min(0), curve.values.max(0)
                axes.fill_between(curve.steps, low, high, color=colours[labeler], alpha=0.15, linewidth=0)
            axes.set_title(quantity)
            axes.set_xlabel("training steps")
        _legend(figure, colours, [name for lines in panels.values() for name in lines])
        return _svg(figure, key)


def agreement(source: np.ndarray, returns: Mapping[str, np.ndarray], colours: Mapping[str, str], key: str) -> str:
    """A panel a labeler: the return of each episode by its labels over that by the file's rewards."""
    with matplotlib.rc_context(_RC):
        columns = min(len(returns), 3)
        rows = -(-len(returns) // columns)
        figure = Figure(figsize=(3.1 * columns + 0.4, 2.6 * rows), layout="constrained")
        shown = _sample(len(source))
        for axes, (labeler, values) in zip(_panels(figure, rows, columns), returns.items(), strict=False):
            axes.plot(source[shown], values[shown], ".", color=colours[labeler], markersize=3, alpha=0.6)
            axes.set_title(labeler)
            axes.set_xlabel("return by the file's rewards")
            axes.set_ylabel("return by these labels")
        return _svg(figure, key)


def histograms(returns: Mapping[str, np.ndarray], colours: Mapping[str, str], key: str) -> str:
    """A panel a labeler: how many episodes have which return by its labels."""
    with matplotlib.rc_context(_RC):
        columns = min(len(returns), 3)
        rows = -(-len(returns) // columns)
        figure = Figure(figsize=(3.1 * columns + 0.4, 2.0 * rows + 0.2), layout="constrained")
        for axes, (labeler, values) in zip(_panels(figure, rows, columns), returns.items(), strict=False):
            axes.hist(values, bins=30, color=colours[labeler], alpha=0.85)
            axes.set_title(labeler)
            axes.set_xlabel("return by these labels")
            axes.set_ylabel("episodes")
        return _svg(figure, key)


def diagnostics(table: pl.DataFrame, lengths: np.ndarray, colour: str, key: str) -> str:
    """A panel for each number that the labeler noted about an episode, over the episode's length."""
    numbers = [name for name in table.columns if table[name].dtype.is_numeric()]
    with matplotlib.rc_context(_RC):
        columns = min(len(numbers), 3)
        rows = -(-len(numbers) // columns)
        figure = Figure(figsize=(3.1 * columns + 0.4, 2.3 * rows), layout="constrained")
        shown = _sample(len(lengths))
        for axes, name in zip(_panels(figure, rows, columns), numbers, strict=False):
            values = table[name].cast(pl.Float64).fill_null(np.nan).to_numpy()[shown]
            axes.plot(lengths[shown], values, ".", color=colour, markersize=3, alpha=0.6)
            positive = values[np.isfinite(values) & (values > 0)]
            if len(positive) and positive.max() > 1000 * positive.min():
                axes.set_yscale("log")
            axes.set_title(name.replace("_", " "))
            axes.set_xlabel("steps in the episode")
        return _svg(figure, key)


def dataset_figure(lengths: np.ndarray, returns: Mapping[str, np.ndarray]) -> str:
    """How long episodes are, and their returns by each label set, as a file of its own."""
    panels = {"steps in an episode": lengths, **{f"return by {name}": values for name, values in returns.items()}}
    with matplotlib.rc_context(_RC):
        columns = min(len(panels), 3)
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(3.1 * columns + 0.4, 2.2 * rows), layout="constrained")
        for place, (axes, (title, values)) in enumerate(
            zip(_panels(figure, rows, columns), panels.items(), strict=False)
        ):
            axes.hist(values, bins=30, color=PALETTE[place % len(PALETTE)], alpha=0.85)
            axes.set_xlabel(title)
            axes.set_ylabel("episodes")
        return standalone(_svg(figure, "dataset"))


def standalone(svg: str) -> str:
    """An inline SVG element as a file of its own, readable on light and dark pages."""
    opening = '<svg xmlns="http://www.w3.org/2000/svg" color="#777777" font-family="sans-serif"'
    return svg.replace("<svg", opening, 1) + "\n"


def colours(labelers: Sequence[str]) -> dict[str, str]:
    """One colour for each labeler, the same in every figure."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(labelers)}


def _sample(n: int, most: int = 3000) -> np.ndarray:
    """At most so many places, evenly spaced: a page with 100,000 points does not open."""
    return np.arange(n) if n <= most else np.linspace(0, n - 1, most).astype(np.int64)


def _panels(figure: Figure, rows: int, columns: int) -> list[Axes]:
    return [axes for row in figure.subplots(rows, columns, squeeze=False) for axes in row]


def _legend(figure: Figure, colours: Mapping[str, str], names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    shown = [name for name in colours if name in set(names)]
    handles = [Line2D([], [], color=colours[name], label=name) for name in shown]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(shown), 6))


def _svg(figure: Figure, key: str) -> str:
    """The figure as an inline SVG element. key: makes ids differ between the figures of one page."""
    for axes in figure.axes:
        if not axes.has_data():
            axes.set_visible(False)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key, "svg.id": key}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)  # it would apply to the whole page
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<svg [^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', _opening, svg, count=1)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # names of groups, the same in every figure and used by none
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    return svg.replace(INK, "currentColor")


def _opening(found: re.Match[str]) -> str:
    width, height = float(found[1]), float(found[2])
    return f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{width * 1.2:.0f}px" role="img">'
