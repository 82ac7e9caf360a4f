"""The page: one HTML file with everything in it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.colors import sequential  # type: ignore[import-untyped]  # has no types
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # has no types

from gnmr_megatron import __version__
from gnmr_megatron.analysis.report.blocks import block
from gnmr_megatron.analysis.report.figures import PAPER_EXCEEDANCE_PERCENT
from gnmr_megatron.analysis.report.grid import MISSING, NOT_FINITE, OFFSET, ZERO
from gnmr_megatron.analysis.report.history import UNKNOWN_REASON
from gnmr_megatron.analysis.report.run_part import RunPart, read_run_part
from gnmr_megatron.analysis.report.spikes import AROUND
from gnmr_megatron.analysis.report.tables import reason_name
from gnmr_megatron.errors import ConfigError
from gnmr_megatron.observability.append_file import replace_file
from gnmr_megatron.observability.console import duration, short_unit
from gnmr_megatron.observability.event_log import FILE

MAX_BYTES = 14_500_000
"""Aim for the size of a page; only the resolution of the heat map gives way to it."""

STYLES = ("plots.css", "tables.css", "report.css")
GENERATOR = "gnmr-megatron report"
SCRIPTS = (
    "unpack.js", "theme.js", "view.js", "lines.js", "grid.js", "heat_map.js", "timeline.js", "report.js",
)  # fmt: skip


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write what the runs did as one HTML file that needs nothing else, and no network.

    Args:
        folders: run folders, also of runs that still go on; their training curves are laid over each other.
        output: the file; one that is there is replaced if it is such a report.

    Returns:
        `output`.

    Raises:
        ConfigError: `output` cannot be written, lies in a run folder, or is another file.
        DataError: a file of a run is missing or damaged; the message names it.
    """
    _check_output(folders, output)
    library = _library()
    share = (MAX_BYTES - len(library) - 300_000) / len(folders)
    parts = [read_run_part(folder, max_bytes=share) for folder in folders]
    content = _render(parts, library).encode()
    try:
        replace_file(output, content)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    return output


@functools.cache
def _library() -> str:
    """Plotly's own script, compressed."""
    return block(get_plotlyjs().encode())


def _check_output(folders: Sequence[Path], output: Path) -> None:
    if not folders:
        raise ConfigError("no run folder given")
    place = output.resolve()
    for folder in folders:
        if (folder / FILE).is_file() and place.is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{output}: lies in the run folder {folder}, which a report leaves as it is; "
                "name a place outside with --output"
            )
    if not place.parent.is_dir():
        raise ConfigError(f"{output}: there is no folder {place.parent}")
    if place.is_dir():
        raise ConfigError(f"{output}: is a folder; name a file")
    if place.exists() and not _is_report(place):
        raise ConfigError(f"{output}: is there already, and no report; name another file")


def _is_report(path: Path) -> bool:
    """Whether a file is a page of ours, by its first lines."""
    with path.open("rb") as file:
        return f'content="{GENERATOR}"'.encode() in file.read(400)


def _render(parts: Sequence[RunPart], library: str) -> str:
    texts = files(__package__) / "page"
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=lambda value: f"{value:,}", digits=_digits, short=short_unit, duration=duration
    )
    return environment.get_template("template.html").render(
        parts=parts,
        generator=GENERATOR,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        paper_percent=PAPER_EXCEEDANCE_PERCENT,
        around=AROUND,
        styles=[Markup((texts / name).read_text()) for name in STYLES],  # noqa: S704 - our own files
        scripts=[Markup((texts / name).read_text()) for name in SCRIPTS],  # noqa: S704
        library=library,
        meta=_page_meta(parts),
    )


def _page_meta(parts: Sequence[RunPart]) -> dict[str, Any]:
    return {
        "runs": [part.meta for part in parts],
        "codes": {"missing": MISSING, "zero": ZERO, "not_finite": NOT_FINITE, "offset": OFFSET},
        "reasons": [reason_name(reason) for reason in range(UNKNOWN_REASON + 1)],
        "colors": list(sequential.Viridis),
        "paper_percent": PAPER_EXCEEDANCE_PERCENT,
    }


def _digits(value: float | None, digits: int = 4) -> str:
    """Significant digits, thousands apart; a dash where there is no number."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0) if value else 0
    return f"{value:,.{places}f}"
