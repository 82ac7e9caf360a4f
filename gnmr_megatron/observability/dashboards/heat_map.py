"""A picture of the risk matrix: units down, steps across, GNMR as colour."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from gnmr_megatron.observability.console import short_unit
from gnmr_megatron.observability.risk_matrix import RiskMatrix

# ColorBrewer's RdBu, blue first: told apart with every common kind of colour blindness
PALETTE = (
    0x053061, 0x2166AC, 0x4393C3, 0x92C5DE, 0xD1E5F0, 0xF7F7F7,
    0xFDDBC7, 0xF4A582, 0xD6604D, 0xB2182B, 0x67001F,
)  # fmt: skip
NOT_A_NUMBER = (128, 128, 128)
LIMIT = 3.0  # of the scale, as a power of two either way
WIDTH, HEIGHT = 900, 640  # of the cells, about
MARGIN, TITLE, AXIS, LEGEND = 90, 24, 24, 70
FONT_SIZE = 11
LABEL_LENGTH = 14
INK = (32, 32, 32)


def gnmr_colours(gnmr: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Colours of ratios: white at 1, red above, blue below, full at 8 and 1/8, grey where it is no number.

    Args:
        gnmr: ratios of any shape.

    Returns:
        [..., 3] RGB.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.log2(gnmr.astype(np.float64))
    stops = np.array([[value >> 16, value >> 8 & 255, value & 255] for value in PALETTE])
    positions = np.linspace(-LIMIT, LIMIT, len(PALETTE))
    values = np.clip(np.nan_to_num(power, nan=0.0), -LIMIT, LIMIT)
    colours = np.stack([np.interp(values, positions, stops[:, rgb]) for rgb in range(3)], axis=-1)
    colours[np.isnan(power)] = NOT_A_NUMBER
    rounded: NDArray[np.uint8] = np.rint(colours).astype(np.uint8)
    return rounded


def draw_heat_map(matrix: RiskMatrix) -> Image.Image:
    """Draw a matrix of at least one step; a black foot marks a unit on the recovery path."""
    num_steps, num_units = matrix.gnmr.shape
    wide, high = max(1, WIDTH // num_steps), min(max(4, HEIGHT // num_units), 24)
    cells = gnmr_colours(matrix.gnmr.T).repeat(high, axis=0).repeat(wide, axis=1)
    recovered = matrix.recovered.T.repeat(high, axis=0).repeat(wide, axis=1)
    foot = np.arange(num_units * high) % high >= high - max(1, high // 4)
    cells[recovered & foot[:, None]] = 0
    height, width = cells.shape[:2]
    page = Image.new("RGB", (MARGIN + width + LEGEND, TITLE + height + AXIS), "white")
    page.paste(Image.fromarray(cells), (MARGIN, TITLE))
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(FONT_SIZE)
    first, last = matrix.steps[0], matrix.steps[-1]
    title = f"GNMR of steps {first} to {last}; black foot: on the recovery path"
    pen.text((MARGIN, TITLE // 2), title, INK, font, anchor="lm")
    for row in range(0, num_units, -(-(FONT_SIZE + 1) // high)):
        middle = TITLE + row * high + high // 2
        name = short_unit(matrix.units[row])[-LABEL_LENGTH:]
        pen.text((MARGIN - 6, middle), name, INK, font, anchor="rm")
    for column in sorted({0, *range(0, num_steps, max(1, 100 // wide)), num_steps - 1}):
        if column == num_steps - 1 or column * wide < width - 50:  # the last step has its place
            left = MARGIN + column * wide + wide // 2
            pen.text((left, TITLE + height + 4), str(matrix.steps[column]), INK, font, anchor="ma")
    _draw_legend(page, pen, font, MARGIN + width + 12)
    return page


def _draw_legend(
    page: Image.Image,
    pen: ImageDraw.ImageDraw,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
    left: int,
) -> None:
    """The scale, from 8 at the top to 1/8."""
    height = page.height - TITLE - AXIS
    powers = np.linspace(LIMIT, -LIMIT, height).astype(np.float32)
    bar = gnmr_colours(np.exp2(powers))[:, None].repeat(14, axis=1)
    page.paste(Image.fromarray(bar), (left, TITLE))
    for text, part in (("8", 0.0), ("1", 0.5), ("1/8", 1.0)):
        pen.text((left + 20, TITLE + part * height), text, INK, font, anchor="lm")
