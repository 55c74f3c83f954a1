"""Pictures of the tutorials for sphinx-gallery: their style, and animations as GIF."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.animation import Animation, PillowWriter
from sphinx_gallery.scrapers import figure_rst, matplotlib_scraper

FRAMES = 12  # of an animation, per second


def style(gallery_conf: Mapping[str, Any], name: str) -> None:
    """Reset matplotlib before a tutorial. Colors are the tutorials' own."""
    pyplot.rcdefaults()
    pyplot.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": "medium",
            "figure.constrained_layout.use": True,
            "figure.figsize": (8, 4),
            "grid.color": "#e4e4e4",
            "legend.frameon": False,
        }
    )


def pictures(block: Any, variables: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """The figures of a code cell: as sphinx-gallery's, but animations as GIF."""
    text = ""
    shown = [pyplot.figure(number) for number in pyplot.get_fignums()]
    for animation in variables["example_globals"].values():
        figure = getattr(animation, "_fig", None)  # matplotlib has no public name for it
        if isinstance(animation, Animation) and figure in shown:
            path = Path(next(variables["image_path_iterator"])).with_suffix(".gif")
            animation.save(path, writer=PillowWriter(fps=FRAMES))
            text += figure_rst([path], gallery_conf["src_dir"], figure.get_label())
            pyplot.close(figure)
    return text + matplotlib_scraper(block, variables, gallery_conf)
