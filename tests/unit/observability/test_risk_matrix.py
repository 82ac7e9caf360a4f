import json

import numpy as np
import pytest

from gnmr_megatron.control.units import Unit, UnitTable
from gnmr_megatron.errors import DataError
from gnmr_megatron.observability.risk_matrix import RiskMatrixWriter, read_risk_matrix

UNITS = UnitTable(
    Unit(layer, position, f"decoder.layers.{layer}.{name}", (8, 4))
    for layer in range(2)
    for position, name in enumerate(("self_attention.linear_qkv", "mlp.linear_fc1"))
)


def append(writer, step, rng):
    norms = rng.lognormal(size=4)
    writer.append(
        step=step,
        updated=step != 2,
        global_norm=float(np.sqrt((norms**2).sum())),
        norms=norms,
        gnmr=norms / 2,
        delta_gnmr=norms / 3,
        recovered=np.array([step % 4]),
        selected=np.array([(step + 1) % 4, 3]),
    )
    return norms


def write(folder, steps):
    writer, rng = RiskMatrixWriter(folder, UNITS), np.random.default_rng(0)
    norms = np.array([append(writer, step, rng) for step in steps])
    writer.close()
    return norms


def test_one_numpy_call_reads_the_matrix(tmp_path):
    norms = write(tmp_path, range(1, 6))
    description = json.loads((tmp_path / "units.json").read_text())
    dtype = np.dtype(description["dtype"])
    assert dtype.itemsize == 8 + 1 + 8 + 4 * (8 + 4 + 4 + 1)
    records = np.fromfile(tmp_path / "risk_matrix.bin", dtype)
    np.testing.assert_array_equal(
        records["norm"], norms
    )  # to the last bit, so that decisions can be replayed
    np.testing.assert_array_equal(records["step"], range(1, 6))
    assert [unit["id"] for unit in description["units"]] == list(UNITS.ids)


def test_everything_comes_back(tmp_path):
    norms = write(tmp_path, range(1, 6))
    matrix = read_risk_matrix(tmp_path)
    assert matrix.units == UNITS.ids
    np.testing.assert_array_equal(matrix.norms, norms)
    np.testing.assert_allclose(matrix.gnmr, norms / 2, rtol=1e-6)
    np.testing.assert_array_equal(matrix.updated, [True, False, True, True, True])
    for row, step in enumerate(range(1, 6)):
        assert np.flatnonzero(matrix.recovered[row]).tolist() == [step % 4]
        assert np.flatnonzero(matrix.selected[row]).tolist() == sorted({(step + 1) % 4, 3})


def test_a_half_written_record_is_left_out_and_cut_off_on_resume(tmp_path):
    norms = write(tmp_path, range(1, 6))
    data = (tmp_path / "risk_matrix.bin").read_bytes()
    (tmp_path / "risk_matrix.bin").write_bytes(data[:-7])
    assert read_risk_matrix(tmp_path).steps.tolist() == [1, 2, 3, 4]
    writer = RiskMatrixWriter.resume(tmp_path, UNITS, 3)
    append(writer, 4, np.random.default_rng(1))
    writer.close()
    matrix = read_risk_matrix(tmp_path)
    assert matrix.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(matrix.norms[:3], norms[:3])


def renamed(table, old, new):
    return UnitTable(Unit(u.layer, u.position, u.id.replace(old, new), u.shape) for u in table)


OTHERS = {
    "is of 4 other units, this model has 1": UnitTable([UNITS[0]]),
    "column 1 is decoder.layers.0.mlp.linear_fc1, in this model decoder.layers.0.mlp.linear_fc2": (
        renamed(UNITS, "linear_fc1", "linear_fc2")
    ),
    "is of units of the same names but other shapes": UnitTable(
        Unit(u.layer, u.position, u.id, (4, 8)) for u in UNITS
    ),
}


@pytest.mark.parametrize("message", OTHERS)
def test_other_units_are_refused_in_a_line(tmp_path, message):
    write(tmp_path, range(1, 3))
    before = (tmp_path / "risk_matrix.bin").read_bytes()
    for read in (
        lambda units: read_risk_matrix(tmp_path, units=units),
        lambda units: RiskMatrixWriter.resume(tmp_path, units, 1),
    ):
        with pytest.raises(DataError, match=f"risk_matrix.bin: .*{message}; use another") as error:
            read(OTHERS[message])
        assert "\n" not in str(error.value)
    assert (tmp_path / "risk_matrix.bin").read_bytes() == before
    assert read_risk_matrix(tmp_path, units=UNITS).units == UNITS.ids


def test_another_version_is_refused(tmp_path):
    write(tmp_path, range(1, 3))
    path = tmp_path / "units.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(DataError, match=r"units\.json: has schema 2, not 1"):
        read_risk_matrix(tmp_path)


def test_numbers_that_are_not_finite_or_too_large_for_a_ratio_are_kept(tmp_path):
    writer = RiskMatrixWriter(tmp_path, UNITS)
    norms = np.array([np.nan, np.inf, 1e300, 0.0])
    nothing = np.array([], dtype=np.int64)
    writer.append(
        step=1,
        updated=False,
        global_norm=np.nan,
        norms=norms,
        gnmr=norms,
        delta_gnmr=norms,
        recovered=nothing,
        selected=nothing,
    )
    writer.close()
    matrix = read_risk_matrix(tmp_path)
    np.testing.assert_array_equal(matrix.norms, [norms])
    np.testing.assert_array_equal(matrix.gnmr, [[np.nan, np.inf, np.inf, 0.0]])
    assert not matrix.updated[0]


def test_a_folder_without_a_matrix_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no risk matrix"):
        read_risk_matrix(tmp_path)
