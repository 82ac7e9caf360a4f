import pytest

import gnmr_megatron


@pytest.mark.parametrize("name", gnmr_megatron.__all__)
def test_every_public_name_is_there(name):
    assert getattr(gnmr_megatron, name) is not None


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="has no attribute nothing"):
        gnmr_megatron.nothing  # noqa: B018 - the access is the test
