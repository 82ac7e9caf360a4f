import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.analysis.report.grid import MISSING, NOT_FINITE, OFFSET, ZERO, make_grid
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.risk_matrix import RiskMatrix


def matrix_of(gnmr, steps):
    gnmr = np.asarray(gnmr, dtype=np.float32)
    none = np.zeros(gnmr.shape, dtype=np.bool_)
    return RiskMatrix(
        units=tuple(f"u{i}" for i in range(gnmr.shape[1])),
        steps=np.asarray(steps, dtype=np.int64),
        updated=np.ones(len(steps), dtype=np.bool_),
        global_norm=np.ones(len(steps)),
        norms=gnmr.astype(np.float64),
        gnmr=gnmr,
        delta_gnmr=gnmr,
        recovered=none,
        selected=none,
    )


VALUES = st.sampled_from([0.0, np.inf, np.nan]) | st.floats(2.0**-60, 2.0**60, width=32)


@st.composite
def matrices(draw):
    units, steps = draw(st.integers(1, 20)), draw(st.integers(1, 12))
    row = st.lists(VALUES, min_size=units, max_size=units)
    gaps = draw(st.lists(st.integers(1, 3), min_size=steps, max_size=steps))
    return matrix_of(draw(st.lists(row, min_size=steps, max_size=steps)), np.cumsum(gaps))


@settings(max_examples=40, deadline=None)
@given(matrices(), st.sampled_from([1e9, 4.0, 0.0]))
def test_each_code_is_the_logarithm_to_within_half_a_step(matrix, max_bytes):
    grid = make_grid(matrix, last_step=100, max_bytes=max_bytes)
    seen = set()
    for row, step in enumerate(matrix.steps):
        for unit, value in enumerate(matrix.gnmr[row]):
            code = int(grid.codes[unit, step - grid.first_step])
            seen.add((unit, step - grid.first_step))
            if value == 0:
                assert code == ZERO
            elif not np.isfinite(value):
                assert code == NOT_FINITE
            else:
                error = abs(code * grid.resolution - np.log(np.float64(value)))
                assert error <= 0.5 * grid.resolution + 1e-4
    rest = np.array([code for at, code in np.ndenumerate(grid.codes) if at not in seen])
    assert (rest == MISSING).all()


@settings(deadline=None)
@given(st.lists(st.integers(MISSING, NOT_FINITE), min_size=1, max_size=50))
def test_unpacking_gives_the_codes(codes):
    grid = make_grid(matrix_of([[1.0]], [1]), last_step=1, max_bytes=1e9)
    object.__setattr__(grid, "codes", np.array([codes], dtype=np.int16))
    low, high = np.frombuffer(grid.packed(), np.uint8).reshape(2, -1).astype(int)
    assert ((high << 8 | low) - OFFSET - 65536 * (high > 127)).tolist() == codes


def test_codes_sort_as_what_they_mean():
    grid = make_grid(matrix_of([[0.0, 1e-9, 1.0, 1e9, np.inf]], [3]), last_step=3, max_bytes=1e9)
    assert sorted(grid.codes[:, 0]) == grid.codes[:, 0].tolist()
    assert grid.codes[0, 0] > MISSING


def test_the_resolution_gives_way_to_the_size():
    noise = np.exp(np.random.default_rng(0).normal(0, 0.3, (4000, 32)))
    sizes = []
    for max_bytes in (90_000, 60_000):
        grid = make_grid(matrix_of(noise, range(1, 4001)), last_step=4000, max_bytes=max_bytes)
        sizes.append((grid.resolution, len(zlib.compress(grid.packed(), 6))))
        assert 0.75 * max_bytes < sizes[-1][1] < 1.05 * max_bytes
    assert sizes[1][0] > sizes[0][0]


@pytest.mark.parametrize("steps", [[2, 2], [2, 1], [0, 1], [5, 11]])
def test_steps_that_cannot_be_are_refused(steps):
    with pytest.raises(DataError, match="do not ascend within 1 to 10"):
        make_grid(matrix_of([[1.0], [1.0]], steps), last_step=10, max_bytes=1e9)


def test_a_matrix_without_steps_has_no_grid():
    empty = matrix_of(np.zeros((0, 3)), [])
    assert make_grid(empty, last_step=10, max_bytes=1e9) is None
