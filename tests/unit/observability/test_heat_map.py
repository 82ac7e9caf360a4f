import numpy as np
import pytest

from gnmr_megatron.observability.dashboards.heat_map import (
    HEIGHT,
    MARGIN,
    TITLE,
    WIDTH,
    draw_heat_map,
    gnmr_colours,
)
from gnmr_megatron.observability.risk_matrix import RiskMatrix

# What each kind of colour blindness sees of linear RGB, at severity 1
# Source: Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009)
SEEN_BY = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip


def matrix(gnmr, recovered=None):
    gnmr = np.asarray(gnmr, dtype=np.float32)
    num_steps, num_units = gnmr.shape
    nothing = np.zeros(gnmr.shape, dtype=bool)
    return RiskMatrix(
        units=tuple(f"decoder.layers.{unit}.mlp.linear_fc1" for unit in range(num_units)),
        steps=np.arange(1, num_steps + 1),
        updated=np.ones(num_steps, dtype=bool),
        global_norm=np.ones(num_steps),
        norms=np.ones(gnmr.shape),
        gnmr=gnmr,
        delta_gnmr=gnmr,
        recovered=nothing if recovered is None else recovered,
        selected=nothing,
    )


def test_colour_is_the_logarithm_white_at_one_and_full_at_eight():
    colours = gnmr_colours(np.float32([1, 8, 64, np.inf, 1 / 8, 0, np.nan])).astype(int)
    np.testing.assert_array_equal(colours[0], [247, 247, 247])
    assert (colours[1:4] == [0x67, 0, 0x1F]).all()
    assert (colours[4:6] == [0x05, 0x30, 0x61]).all()
    np.testing.assert_array_equal(colours[6], [128, 128, 128])
    twice, half = gnmr_colours(np.float32([2, 0.5])).astype(int)
    assert twice[0] > twice[2]
    assert half[2] > half[0]


@pytest.mark.parametrize("kind", SEEN_BY)
def test_growth_and_shrinking_are_told_apart_with_each_kind_of_colour_blindness(kind):
    def seen(ratio):
        linear = (gnmr_colours(np.float32(ratio)) / 255) ** 2.2
        return 255 * np.clip(np.array(SEEN_BY[kind]) @ linear, 0, 1) ** (1 / 2.2)

    one = seen(1)
    for ratio in (2, 4, 8):
        up, down = seen(ratio), seen(1 / ratio)
        assert min(np.linalg.norm(up - down), np.linalg.norm(up - one)) > 40


@pytest.mark.parametrize(("num_steps", "num_units"), [(1, 1), (100, 16), (900, 160), (7, 400)])
def test_every_cell_has_its_place(num_steps, num_units):
    rng = np.random.default_rng(0)
    given = matrix(
        np.exp2(rng.normal(size=(num_steps, num_units))), rng.random((num_steps, num_units)) < 0.1
    )
    pixels = np.asarray(draw_heat_map(given))
    wide, high = max(1, WIDTH // num_steps), min(max(4, HEIGHT // num_units), 24)
    for step, unit in ((0, 0), (num_steps - 1, num_units - 1), (num_steps // 2, num_units // 3)):
        left, top = MARGIN + step * wide, TITLE + unit * high
        cell = pixels[top : top + high, left : left + wide]
        np.testing.assert_array_equal(cell[0, 0], gnmr_colours(given.gnmr)[step, unit])
        assert (cell[-1] == 0).all() == given.recovered[step, unit]
