import os
import signal

import pytest

from gnmr_megatron.training.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_becomes_a_wish_to_stop_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with Interruption(60, pytest.fail) as interruption:
        assert not interruption.is_requested
        os.kill(os.getpid(), number)
        assert interruption.is_requested
        assert interruption.signal_name == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once():
    with Interruption(60, pytest.fail):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
