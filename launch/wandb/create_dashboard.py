"""Create the W&B workspace of gnmr_megatron's runs.

pip install 'gnmr-megatron[dashboard]' && wandb login
python launch/wandb/create_dashboard.py --entity TEAM --project gnmr-megatron

Run it again for a new view; W&B keeps the others. --dry-run prints what would be sent, and needs no network.
"""

from __future__ import annotations

import argparse
import json
import sys

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

WIDE = wr.Layout(w=24, h=10)


def line(title: str, *metrics: str, regex: str | None = None, log_y: bool = False) -> wr.LinePlot:
    """Metrics over the optimizer step; by their names, or all whose names match."""
    return wr.LinePlot(
        title=title,
        x="Step",
        y=list(metrics),
        metric_regex=regex,
        log_y=log_y,
        max_runs_to_show=10,
        layout=wr.Layout(w=8, h=8),
    )


def bars(key: str, value: str) -> wr.CustomChart:
    """One of the tracker's bar charts, drawn from its table."""
    return wr.CustomChart(
        query={"summaryTable": {"tableKey": f"{key}_table"}},
        chart_name="wandb/bar/v0",
        chart_fields={"label": "unit", "value": value},
        chart_strings={"title": value},
        layout=wr.Layout(w=12, h=10),
    )


def sections() -> list[ws.Section]:
    """Top to bottom, what one asks first."""
    return [
        ws.Section(
            name="Loss",
            is_open=True,
            panels=[
                line("training loss", "train/loss"),
                line("held-out loss", "eval/loss"),
                line("gradient norm", "train/grad_norm", log_y=True),
                line("learning rate", "train/learning_rate"),
            ],
        ),
        ws.Section(
            name="Recovery",
            is_open=True,
            panels=[
                line("units on the recovery path", "control/recovered"),
                line("units over a threshold", "control/over_threshold"),
                line("highest score", "control/riskiest_score", log_y=True),
                bars("control/recovered_units", "steps on the recovery path"),
            ],
        ),
        ws.Section(
            name="Riskiest units",
            is_open=True,
            panels=[
                bars("control/riskiest_units", "highest GNMR"),
                line("GNMR of tracking.unit_metrics", regex="^gnmr/.*", log_y=True),
                line("delta-GNMR of tracking.unit_metrics", regex="^delta_gnmr/.*", log_y=True),
            ],
        ),
        ws.Section(
            name="Heat map",
            is_open=True,
            panels=[wr.MediaBrowser(media_keys=["control/heat_map"], num_columns=1, layout=WIDE)],
        ),
        ws.Section(
            name="Recovery sets",
            is_open=True,
            panels=[wr.WeavePanelSummaryTable(table_name="control/recovery_set", layout=WIDE)],
        ),
        ws.Section(
            name="Throughput",
            is_open=True,
            panels=[
                line("tokens per second", "perf/tokens_per_second"),
                line("step time, s", "perf/step_seconds"),
                line("tokens", "train/tokens"),
            ],
        ),
        ws.Section(
            name="Overhead of control",
            is_open=True,
            panels=[
                line("deciding and switching, % of the step", "control/percent"),
                line("deciding and switching, s", "control/seconds"),
            ],
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Create the workspace, or print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entity", required=True, help="W&B team or user")
    parser.add_argument("--project", default="gnmr-megatron", help="W&B project of the runs")
    parser.add_argument("--name", default="GNMR control", help="name of the view")
    parser.add_argument("--dry-run", action="store_true", help="print it; send nothing")
    options = parser.parse_args(arguments)
    workspace = ws.Workspace(
        entity=options.entity, project=options.project, name=options.name, sections=sections()
    )
    if options.dry_run:
        sys.stdout.write(json.dumps(workspace._spec, indent=1) + "\n")
        return 0
    try:
        sys.stdout.write(f"{workspace.save().url}\n")
    except Exception as error:  # noqa: BLE001 - its client raises whatever the network did
        why = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(f"W&B did not take the workspace ({why}); see `wandb login`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
