import pytest

from gnmr_megatron.control.units import Unit, UnitTable


def unit(layer, position, name="linear_fc1"):
    return Unit(layer, position, f"decoder.layers.{layer}.mlp.{name}", (8, 4))


def test_units_are_in_the_order_of_layers_and_then_of_the_forward_pass():
    table = UnitTable([unit(10, 0), unit(2, 1, "linear_fc2"), unit(2, 0)])
    assert [(u.layer, u.operator) for u in table] == [
        (2, "linear_fc1"),
        (2, "linear_fc2"),
        (10, "linear_fc1"),
    ]
    assert table.index("decoder.layers.10.mlp.linear_fc1") == 2


def test_a_unit_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match=r"unit decoder\.layers\.0\.mlp\.linear_fc1 occurs twice"):
        UnitTable([unit(0, 0), unit(0, 1)])


def test_the_fingerprint_tells_tables_apart_and_not_the_order_they_came_in():
    one = UnitTable([unit(0, 0), unit(1, 0)])
    assert one.fingerprint == UnitTable([unit(1, 0), unit(0, 0)]).fingerprint
    assert one.fingerprint != UnitTable([unit(0, 0)]).fingerprint
    wider = UnitTable([unit(0, 0), Unit(1, 0, "decoder.layers.1.mlp.linear_fc1", (16, 4))])
    assert one.fingerprint != wider.fingerprint
