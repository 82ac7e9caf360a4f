"""Draw what a run logged to W&B offline, in the order of the workspace, without W&B; needs Chromium.

python tools/draw_wandb_run.py RUN OUTPUT.png
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

from gnmr_megatron.observability.dashboards.wandb_file import logged_rows

LINES = [
    ("Loss", ["train/loss", "eval/loss"]),
    ("Gradient norm", ["train/grad_norm"]),
    (
        "Units on the recovery path, and over a threshold",
        ["control/recovered", "control/over_threshold"],
    ),
    ("Highest score", ["control/riskiest_score"]),
    ("Tokens per second", ["perf/tokens_per_second"]),
    ("Deciding and switching, % of the step", ["control/percent"]),
]
BARS = [
    ("control/riskiest_units", "Highest GNMR"),
    ("control/recovered_units", "Steps on the recovery path"),
]
COLOURS = ["#0072B2", "#E69F00"]  # of Okabe and Ito, told apart with every kind of colour blindness
PAGE = """<script>{script}</script><body style="margin:0;font-family:sans-serif">
<div style="display:flex;flex-wrap:wrap">{panels}</div>"""


def main(run: Path, output: Path) -> None:
    rows: dict[int, dict[str, Any]] = {}
    media: dict[str, Path] = {}
    for path in sorted((run / "wandb").glob("*run-*/*.wandb")):
        for row in logged_rows(path):
            for item in row.item:
                key = item.key or "/".join(item.nested_key)
                rows.setdefault(row.step.num, {})[key] = json.loads(item.value_json)
                if key.endswith("/path"):
                    media[key.removesuffix("/path")] = (
                        path.parent / "files" / json.loads(item.value_json)
                    )
    panels = [line(title, names, rows) for title, names in LINES]
    panels += [bars(title, json.loads(media[f"{key}_table"].read_text())) for key, title in BARS]
    picture = b64encode(media["control/heat_map"].read_bytes()).decode()
    panels.append(f'<img src="data:image/png;base64,{picture}">')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium")
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.set_content(PAGE.format(script=get_plotlyjs(), panels="".join(panels)))
        page.screenshot(path=output, full_page=True)
        browser.close()


def line(title: str, names: list[str], rows: dict[int, dict[str, Any]]) -> str:
    figure = go.Figure()
    for name, colour in zip(names, COLOURS, strict=False):
        steps = [step for step, row in rows.items() if name in row]
        figure.add_scatter(
            x=steps,
            y=[rows[step][name] for step in steps],
            name=name,
            line={"color": colour},
            mode="lines" if len(steps) > 20 else "lines+markers",
        )
    return panel(figure, title)


def bars(title: str, table: dict[str, Any]) -> str:
    units, values = zip(*reversed(table["data"]), strict=True)
    figure = go.Figure(go.Bar(x=values, y=units, orientation="h", marker_color=COLOURS[0]))
    return panel(figure, title)


def panel(figure: go.Figure, title: str) -> str:
    figure.update_layout(
        title=title,
        width=400,
        height=260,
        template="simple_white",
        showlegend=len(figure.data) > 1,
        margin={"l": 50, "r": 15, "t": 40, "b": 35},
        legend={"orientation": "h"},
    )
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"staticPlot": True})
    return text


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
