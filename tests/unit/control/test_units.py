import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnmr_megatron.control.units import Unit, UnitTable


def unit(layer, position, name="linear_fc1", shape=(8, 4)):
    return Unit(layer, position, f"decoder.layers.{layer}.mlp.{name}", shape)


def test_units_are_in_the_order_of_layers_and_then_of_the_forward_pass():
    table = UnitTable([unit(10, 0), unit(2, 1, "linear_fc2"), unit(2, 0)])
    assert [(u.layer, u.operator) for u in table] == [
        (2, "linear_fc1"),
        (2, "linear_fc2"),
        (10, "linear_fc1"),
    ]
    assert table.index("decoder.layers.10.mlp.linear_fc1") == 2


@given(st.permutations([unit(i // 3, i % 3, f"linear_{i % 3}") for i in range(12)]))
@settings(deadline=None)
def test_the_table_is_the_same_in_whatever_order_its_units_come(units):
    table = UnitTable(units)
    straight = UnitTable(sorted(units))
    assert (table.ids, table.fingerprint) == (straight.ids, straight.fingerprint)
    assert [table[index] for index in range(len(table))] == list(table)
    assert [table.index(unit_id) for unit_id in table.ids] == list(range(12))


def test_a_unit_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match=r"unit decoder\.layers\.0\.mlp\.linear_fc1 occurs twice"):
        UnitTable([unit(0, 0), unit(1, 0), unit(0, 1)])


def test_an_unknown_unit_is_a_key_error():
    with pytest.raises(KeyError, match="elsewhere"):
        UnitTable([unit(0, 0)]).index("elsewhere")


@pytest.mark.parametrize(
    "other",
    [
        [],
        [unit(0, 0)],
        [unit(0, 0), unit(1, 0, shape=(16, 4))],
        [unit(0, 0), unit(1, 0, shape=(4, 8))],
        [unit(0, 0), unit(1, 0, "linear_fc2")],
        [unit(0, 0), unit(1, 0), unit(2, 0)],
        [Unit(1, 0, unit(0, 0).id, (8, 4)), Unit(0, 0, unit(1, 0).id, (8, 4))],
    ],
    ids=["empty", "fewer", "wider", "transposed", "renamed", "more", "reordered"],
)
def test_tables_that_differ_have_different_fingerprints(other):
    assert UnitTable(other).fingerprint != UnitTable([unit(0, 0), unit(1, 0)]).fingerprint
