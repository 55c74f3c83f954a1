"""Runs side by side as one HTML page, with curves that can be zoomed.

The page embeds Plotly's script and makes no requests. Its content security policy forbids them.
"""

import html
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powergossip.runs.figures import line_style, panels

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from powergossip.compare.groups import Section

# Only contents of the page itself: its scripts and styles, and images that the scripts make.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 92rem; padding: 0 1rem;
       color: #222; background: #fff; line-height: 1.4; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.85rem; }
th, td { padding: 0.3rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.line { display: inline-block; width: 1.6rem; margin-right: 0.5rem; vertical-align: middle;
        border-top-width: 3px; }
.plotly-graph-div { margin: 1rem 0; }
.hint { color: #555; font-size: 0.85rem; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; }
  th, td { border-color: #444; }
  .hint { color: #aaa; }
}
"""
# Colors of curves, which lie on the page's background: readable in light and dark mode.
INK = "#7a7a7a"
LAYOUT = {
    "template": "none",
    "paper_bgcolor": "rgba(0, 0, 0, 0)",
    "plot_bgcolor": "rgba(0, 0, 0, 0)",
    "font": {"color": INK},
    "hovermode": "closest",
    "margin": {"l": 70, "r": 20, "t": 60, "b": 60},
    "legend": {"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0},
}
AXIS = {
    "showline": True,
    "linecolor": INK,
    "gridcolor": "rgba(128, 128, 128, 0.25)",
    "zeroline": False,
}
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d"],
}
_DASHES = {"-": "solid", "--": "dash", ":": "dot"}  # of matplotlib → of Plotly
_BORDERS = {"-": "solid", "--": "dashed", ":": "dotted"}  # → of CSS


def available() -> bool:
    """True if Plotly, which has the script, is installed."""
    return find_spec("plotly") is not None


def write(sections: "Sequence[Section]", path: Path) -> None:
    """Write the page. Plotly must be installed, see `available`."""
    from plotly.offline import get_plotlyjs

    path.write_text(document(sections, get_plotlyjs()), encoding="utf-8")


def document(sections: "Sequence[Section]", script: str) -> str:
    """Return the text of the page. `script` is Plotly's."""
    parts = [_section(section, f"plot{i}") for i, section in enumerate(sections, 1)]
    runs = sum(len(group.runs) for section in sections for group in section.groups)
    title = "1 run" if runs == 1 else f"{runs} runs side by side"
    hint = """Drag to zoom, double-click to go back. A click on a name in the legend hides its
curves, a double click the others."""
    return html_of(title, STYLE, script, "<body>", hint, "".join(parts))


def html_of(title: str, style: str, script: str, begin: str, hint: str, body: str) -> str:
    """Return the text of a page without requests. `begin` is the tag of its body."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<script>{script}</script>
</head>
{begin}
<h1>{title}</h1>
<p class="hint">{hint}</p>
{body}</body>
</html>
"""


def _section(section: "Section", name: str) -> str:
    header, *lines = section.table()
    labels = section.labels()
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><td>{_key(i)}{html.escape(labels[i])}</td>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in line)
        + "</tr>\n"
        for i, line in enumerate(lines)
    )
    plot = figure(section.bands(), section.metric.label, section.metric.step, section.logarithmic())
    shown = plot.to_html(
        CONFIG, include_plotlyjs=False, full_html=False, default_height="30rem", div_id=name
    )
    return f"""<h2>{html.escape(section.title)}</h2>
<p>{html.escape(section.note())}</p>
<div class="scroll"><table>
<thead><tr><th></th>{head}</tr></thead>
<tbody>
{body}</tbody>
</table></div>
{shown}
"""


def _key(index: int) -> str:
    """The line of a group in the figure, before its name."""
    color, style = line_style(index)
    return f'<span class="line" style="border-top-style:{_BORDERS[style]};color:{color}"></span>'


def figure(
    bands: "Mapping[str, DataFrame]", y: str, step: str = "epoch", log_y: bool = False
) -> "Figure":
    """Return Plotly's figure with the panels of figures.side_by_side."""
    from plotly.subplots import make_subplots

    shown = panels(bands, step)
    found = make_subplots(
        cols=len(shown),
        shared_yaxes=True,
        horizontal_spacing=0.06,
        subplot_titles=[panel.title for panel in shown],
    )
    found.update_layout(LAYOUT)
    found.update_xaxes(AXIS)
    found.update_yaxes(AXIS, type="log" if log_y else "linear", showticklabels=True)
    found.update_yaxes(title_text=html.escape(y, quote=False), col=1)
    for column, panel in enumerate(shown, 1):
        found.update_xaxes(title_text=panel.x, type="log" if panel.log_x else "linear", col=column)
        for index, (label, band) in enumerate(panel.bands.items()):
            traces = _traces(band, panel.column, step, index, label, log_y)
            found.add_traces(traces, rows=1, cols=column)
    return found


def _traces(
    band: "DataFrame", column: str, step: str, index: int, label: str, log_y: bool
) -> list[dict[str, Any]]:
    """The line of a group in a panel, and its band."""
    from plotly.colors import hex_to_rgb

    color, style = line_style(index)
    mean, deviation = band["mean"], band["deviation"]
    common = {
        "type": "scatter",
        "x": band[column].tolist(),
        "legendgroup": f"group{index}",
        "name": html.escape(label, quote=False),  # Plotly reads some tags in names
    }
    traces = []
    if deviation.notna().any():
        edge = common | {
            "mode": "lines",
            "line": {"width": 0, "color": color},
            "showlegend": False,
            "hoverinfo": "skip",
        }
        # A logarithmic axis has no place for values that are not positive.
        low = (mean - deviation).mask(log_y & (mean <= deviation), mean / 100)
        fill = f"rgba{(*hex_to_rgb(color), 0.2)}"
        traces = [
            edge | {"y": low.tolist()},
            edge | {"y": (mean + deviation).tolist(), "fill": "tonexty", "fillcolor": fill},
        ]
    at = f"{step} %{{customdata:.4g}}"
    if column != "epoch":
        at += f", %{{x:.4g}} {'MB' if column == 'megabytes' else 's'}"
    traces.append(
        common
        | {
            "y": mean.tolist(),
            "mode": "lines+markers" if len(band) <= 25 else "lines",
            "line": {"color": color, "dash": _DASHES[style], "width": 2},
            "marker": {"size": 5},
            "showlegend": column == "epoch",  # a name once for all panels
            "text": [f" ± {d:.2g}" if math.isfinite(d) else "" for d in deviation],
            "customdata": band["epoch"].tolist(),
            "hovertemplate": f"%{{y:.4g}}%{{text}}<br>{at}",
        }
    )
    return traces
