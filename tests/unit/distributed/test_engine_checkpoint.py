import pickle

import pytest
import torch

from gnmr_megatron.distributed.engine_checkpoint import load_weights, without_extra_state


class KeepsScales(torch.nn.Linear):
    """As Transformer Engine's modules: an extra state that is unpickled unless it is empty."""

    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps({"scale": 2.0})), dtype=torch.uint8)

    def set_extra_state(self, state):
        if state.numel():
            pytest.fail("an extra state would be unpickled")


def test_what_a_module_would_unpickle_is_neither_saved_nor_loaded():
    saved, fresh = (torch.nn.Sequential(KeepsScales(3, 2), torch.nn.Linear(2, 2)) for _ in range(2))
    content = without_extra_state(saved.state_dict())
    assert sorted(content) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    load_weights(fresh, content)
    for name, weight in fresh.named_parameters():
        torch.testing.assert_close(weight, saved.get_parameter(name), rtol=0, atol=0)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="Missing key"):
        load_weights(KeepsScales(3, 2), {"weight": torch.zeros(2, 3)})
