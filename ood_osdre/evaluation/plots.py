r"""Panels: curves with names, drawn into an image or as an SVG element of a page.

Matplotlib is imported here alone, whatever backend the environment names.
"""

__all__ = [
    "ID_STROKE",
    "STROKES",
    "STYLE",
    "Array",
    "Figure",
    "Line",
    "MaxNLocator",
    "Panel",
    "Stroke",
    "as_svg",
    "draw_panels",
    "legend_name",
    "over_steps",
    "save_png",
    "stroke",
    "swatch",
]

import html
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

try:
    import matplotlib
except ValueError:
    # A notebook's MPLBACKEND may name a backend that is not installed here. Files need none.
    backend = os.environ.pop("MPLBACKEND")
    for half_imported in [name for name in sys.modules if name.startswith("matplotlib.")]:
        del sys.modules[half_imported]
    import matplotlib

    os.environ["MPLBACKEND"] = backend
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray
from PIL import Image

from ..files import atomic_path

Array = NDArray[np.float64]
Dashes = str | tuple[int, tuple[float, ...]]
Stroke = tuple[str, Dashes]

# What neither is pure black, which an SVG leaves out, nor looks otherwise.
INK = "#010101"
ID_STROKE: Stroke = ("#4d4d4d", "-")
# Okabe and Ito's colour-blind-safe palette; the dashes tell sets apart in grey, too.
STROKES: tuple[Stroke, ...] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 1.5))),
    ("#009E73", (0, (1, 1))),
    ("#CC79A7", (0, (4, 1.5, 1, 1.5))),
    ("#E69F00", (0, (8, 2))),
    ("#56B4E9", (0, (2, 1))),
)
PAGE_COLORS = {INK: "currentColor", ID_STROKE[0]: "var(--id)"}
PAGE_COLORS |= {color: f"var(--s{i})" for i, (color, _) in enumerate(STROKES)}
# Any, as the names of the parameters differ between versions of Matplotlib.
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#333333",
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.unicode_minus": True,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.direction": "out",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


class Line(NamedTuple):
    r"""A curve of a panel.

    Attributes:
        name: What it is of.
        x: Where it has values, with shape :math:`(G)`; or the edges of bins, :math:`(G + 1)`.
        y: The values, with shape :math:`(G)`.
        stroke: Its colour and dashes.
        note: What else the legend says.
        mark: Where a thin vertical line of its colour is drawn, None for nowhere.
    """

    name: str
    x: Array
    y: Array
    stroke: Stroke
    note: str = ""
    mark: float | None = None


class Panel(NamedTuple):
    r"""One pair of axes.

    Attributes:
        title: The title.
        x: The label of the x-axis, with its unit.
        y: The label of the y-axis, with its unit.
        lines: The curves.
        xlim: The ends of the x-axis, None to fit.
        ylim: The ends of the y-axis, None to fit.
        level: Where a thin horizontal line is drawn, None for nowhere.
        fill: Whether the areas below the curves are filled.
        log: Whether the y-axis is logarithmic.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    xlim: tuple[float, float] | None = None
    ylim: tuple[float, float] | None = None
    level: float | None = None
    fill: bool = False
    log: bool = False


def stroke(index: int) -> Stroke:
    r"""Returns the colour and dashes of the curve of an index; they come again after six."""
    return STROKES[index % len(STROKES)]


def legend_name(name: str) -> str:
    r"""Returns a name to be shown in a legend, where Matplotlib leaves out what begins with `_`."""
    return f" {name}" if name.startswith("_") else name


def draw_panels(path: str | os.PathLike[str], panels: Sequence[Panel], title: str) -> None:
    r"""Draws panels side by side on common axes, a legend below each, into an image.

    Arguments:
        path: The PNG file to write, atomically.
        panels: The panels, at least one.
        title: The title of the figure.
    """
    rows = max(len(panel.lines) for panel in panels)
    size = 0.6 + 3.8 * len(panels), 2.9 + 0.33 * rows  # in inches
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=11)
        axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), handlelength=2.5)
            ax.label_outer()
        save_png(figure, path, dpi=200)


def save_png(figure: Figure, path: str | os.PathLike[str], dpi: float | None = None) -> None:
    r"""Writes a figure atomically as PNG, in 256 colours: that takes a third of the size.

    Arguments:
        figure: The figure.
        path: The file.
        dpi: The pixels an inch; None for those of the figure.
    """
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi or "figure")
        # Colours are spread over those there are: the median cut spends them on large areas, and
        # grey letters beside a picture in viridis turn green.
        method = Image.Quantize.MAXCOVERAGE
        with Image.open(temporary) as image:
            reduced = image.convert("RGB").quantize(256, method, dither=Image.Dither.NONE)
        reduced.save(temporary, format="PNG", optimize=True)


def over_steps(
    stage: str, entries: Sequence[Mapping[str, Any]], names: Mapping[str, str] | None = None
) -> list[Panel]:
    r"""Returns the losses, the validation and the calibration of a training over its steps.

    Those of calibration have a level, 0, at which a ratio would be exact. What was logged once alone
    is no curve: of such numbers there is no panel.

    Arguments:
        stage: The name of the stage, "" for the only one.
        entries: What was logged, named numbers with their `step`; what is no number is left out.
        names: What to call numbers in a legend, where that is not their own name.
    """
    entries = [e for e in entries if _is_number(e.get("step"))]
    logged = list(dict.fromkeys(name for entry in entries for name in entry))
    watched = ("val_near", "val_far", "val_auroc", "val_accuracy", "held_out_auroc")
    groups: dict[str, tuple[str, list[str]]] = {
        "Losses": ("loss", [n for n in logged if n.startswith("loss_") or n == "held_out"]),
        "Validation": ("fraction", [n for n in logged if n in watched]),
        "Calibration": ("nats", [n for n in logged if n.endswith(("log_mass_0", "log_mass_1"))]),
    }
    panels = []
    for title, (label, keys) in groups.items():
        lines: list[Line] = []
        for key in keys:
            points = [(e["step"], e[key]) for e in entries if _is_number(e.get(key))]
            if points:
                x, y = np.array(points, dtype=np.float64).T
                name = (names or {}).get(key, key)
                lines.append(Line(name, x, y, stroke(len(lines)), f"last {y[-1]:.4g}"))
        ends = [end for line in lines for end in (line.y.min(), line.y.max())]
        # Losses often fall by orders of magnitude in the first steps.
        log = label == "loss" and bool(ends) and 0 < 30 * min(ends) < max(ends)
        level = 0.0 if title == "Calibration" else None
        if any(line.x.size > 1 for line in lines):
            title = f"{title} of {stage}" if stage else title
            panels.append(Panel(title, "step", label, lines, level=level, log=log))
    return panels


def _is_number(value: object) -> bool:
    # Of whole numbers, JSON has some that are larger.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def swatch(style: Stroke) -> str:
    r"""Returns a short line in a colour and dashes, as an SVG element for the legend of a page."""
    color, dashes = style
    pattern = " ".join(f"{2 * d:g}" for d in (dashes[1] if isinstance(dashes, tuple) else ()))
    return (
        f'<svg viewBox="0 0 32 8" aria-hidden="true"><path d="M 0 4 L 32 4" fill="none" '
        f'style="stroke: {PAGE_COLORS[color]}; stroke-width: 2; '
        f'stroke-dasharray: {pattern or "none"}"/></svg>'
    )


def as_svg(panel: Panel, salt: str) -> str:
    r"""Returns a panel, without its title and a legend, as an SVG element to stand in a page.

    It has no background, and its colours are the page's: the ink is `currentColor`, the ID curve
    the property `--id`, and the others are `--s0` to `--s5`.

    Arguments:
        panel: The panel.
        salt: What no other figure of the page has: names within the figure are made of it.
    """
    style = STYLE | {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
    style |= {"axes.edgecolor": INK, "axes.labelcolor": INK, "svg.fonttype": "none"}
    with matplotlib.rc_context(style | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(4.0, 2.7), layout="constrained")
        FigureCanvasSVG(figure)
        _draw(figure.subplots(), panel._replace(title=""))
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    box, text = re.findall(r'<svg [^>]*(viewBox="[^"]*")[^>]*>(.*)', file.getvalue(), re.DOTALL)[0]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'font-family: [^;"]*; |(?<=<g) id="[^"]*"|xlink:(?=href)', "", text)
    # A hundredth of a point is enough; the numbers at the ticks are no attributes.
    text = re.sub(r'="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    for color, name in PAGE_COLORS.items():
        text = text.replace(f": {color.lower()}", f": {name}")
    return f'<svg {box} role="img" aria-label="{html.escape(panel.title)}">{text}'


def _draw(ax: Axes, panel: Panel) -> None:
    r"""Draws a panel."""
    for i, line in enumerate(panel.lines):
        (color, dashes), fill = line.stroke, 0.08 if i else 0.25
        x, y = line.x, line.y
        label = legend_name("\n".join(filter(None, (line.name, line.note))))
        style: dict[str, Any] = {"color": color, "linestyle": dashes, "linewidth": 1.5}
        if x.size == y.size:
            ax.plot(x, y, label=label, marker="." if x.size == 1 else None, **style)
        else:
            ax.stairs(y, x, label=label, **style)
        if panel.fill and x.size == y.size:
            ax.fill_between(x, y, color=color, alpha=fill, linewidth=0)
        elif panel.fill:
            ax.stairs(y, x, color=color, alpha=fill, fill=True, linewidth=0)
        if line.mark is not None:
            ax.axvline(line.mark, color=color, linestyle=dashes, linewidth=0.8)
    if panel.level is not None:
        ax.axhline(panel.level, color=INK, linewidth=0.5)
    if panel.log:
        ax.set_yscale("log")
        # Also where there is no whole decade, two ticks have numbers.
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.locator_params(axis="y", nbins=5)
    ax.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    ax.set(**{k: v for k in ("xlim", "ylim") if (v := getattr(panel, k)) is not None})
