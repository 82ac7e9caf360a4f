"""A calibration for people, and as the settings file that `train --config` takes."""

from __future__ import annotations

from pathlib import Path

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gnmr_megatron.analysis.calibration import Calibration, Part
from gnmr_megatron.errors import ConfigError

BAR = 20


def fragment(found: Calibration) -> str:
    """YAML of the section `gnmr`; settings that it does not name stay as other files give them."""
    chosen = found.chosen
    head = (
        f"# From {found.run} by gnmr-megatron calibrate: exceedance rate {chosen.target:g} wanted,\n"
        f"# {chosen.fit.exceedance_rate:.5f} in steps {_steps(chosen.fit)} (fit), "
        f"{chosen.held_out.exceedance_rate:.5f} in steps {_steps(chosen.held_out)} (check).\n"
    )
    return head + yaml.safe_dump({"gnmr": found.settings}, sort_keys=False)


def write_fragment(found: Calibration, path: Path) -> None:
    """Write the settings to a new file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        with path.open("x") as file:
            file.write(fragment(found))
    except FileExistsError as error:
        raise ConfigError(f"--output: {path} exists; name another file or remove it") from error
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written ({error.strerror})") from error


def print_calibration(console: Console, found: Calibration) -> None:
    """Print settings, both rates, the curve, and what to beware of."""
    chosen = found.chosen
    for name, part in (("fit", chosen.fit), ("check", chosen.held_out)):
        counts = (
            f"{part.exceedances:,} unit-steps; wanted {chosen.target:.3%}, {part.expected:,.1f}"
        )
        console.print(
            f"{name:6} steps {_steps(part)}: exceedance rate {part.exceedance_rate:.3%} ({counts}), "
            f"recovered {part.recovered_rate:.3%}",
            soft_wrap=True,
        )
    console.print(
        f"of the fit's exceedances {found.by_gnmr:.0%} pass alpha, {found.by_delta_gnmr:.0%} pass beta",
        soft_wrap=True,
    )
    console.print(_curve(found))
    for warning in found.warnings:
        console.print(f"warning: {warning}", soft_wrap=True, markup=False, style="yellow")


def _curve(found: Calibration) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    for name in ("wanted", "alpha", "beta", "fit", "check", "recovered", "over budget"):
        table.add_column(name, justify="right")
    table.add_column("recovered in the check")
    largest = max(point.held_out.recovered_rate for point in found.curve)
    for point in found.curve:
        part = point.held_out
        table.add_row(
            f"{point.target:.3%}",
            f"{point.alpha:g}",
            f"{point.beta:g}",
            f"{point.fit.exceedance_rate:.3%}",
            f"{part.exceedance_rate:.3%}",
            f"{part.recovered_rate:.3%}",
            f"{part.saturated:.1%}",
            "█" * round(BAR * part.recovered_rate / largest) if largest else "",
            style="bold" if point is found.chosen else None,
        )
    return table


def _steps(part: Part) -> str:
    return f"{part.first_step} to {part.last_step}"
