"""Ports, interfaces and W&B, on real sockets."""

import http.server
import os
import socket
import threading

import pytest

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.training.checkup.network import (
    check_names,
    check_ports,
    check_wandb,
    free_port,
    known_interface,
)

ONLINE = TrackingConfig(wandb_mode="online")


@pytest.fixture
def taken():
    """A port at which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_found_with_who_listens_there(taken):
    found = free_port(taken, is_required=True)
    assert found.status == "problem"
    assert f"(process {os.getpid()}) listens at it" in found.detail
    assert "RDZV_PORT" in found.advice
    (first, _) = check_ports(f"localhost:{taken}", nodes=1)
    assert first == found


def test_a_run_of_one_node_does_without_the_port_and_is_only_warned(taken):
    assert free_port(taken, is_required=False).status == "warning"


def test_a_free_port_can_be_used_afterwards(taken):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert free_port(port, is_required=True).status == "ok"
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("endpoint", "part"),
    [
        ("no-such-host.invalid:29500", "the name no-such-host.invalid is not known here"),
        ("localhost", "is no HOST:PORT"),
        ("localhost:70000", "is no HOST:PORT"),
    ],
)
def test_a_place_where_nobody_can_meet_is_found(endpoint, part):
    (found,) = check_ports(endpoint, nodes=2)
    assert found.status == "problem"
    assert part in found.detail


def test_interfaces_that_are_named_have_to_be_there():
    assert known_interface("GLOO_SOCKET_IFNAME", "lo").status == "ok"
    found = known_interface("GLOO_SOCKET_IFNAME", "nope0")
    assert found.status == "problem"
    assert "lo" in found.advice
    assert known_interface("NCCL_SOCKET_IFNAME", "l").status == "ok"  # a prefix
    assert known_interface("NCCL_SOCKET_IFNAME", "=l").status == "problem"
    assert known_interface("NCCL_SOCKET_IFNAME", "^nope").status == "ok"
    named = check_names({"NCCL_SOCKET_IFNAME": "nope0"})
    assert [found.check for found in named if found.status == "problem"] == ["NCCL_SOCKET_IFNAME"]


@pytest.fixture
def no_key(tmp_path, monkeypatch):
    """An account without a key, also on a machine that has one."""
    for variable in ("WANDB_API_KEY", "NETRC", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def server(monkeypatch, no_key):
    """A server in W&B's place; it knows nothing, but answers."""
    service = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
    )
    service.RequestHandlerClass.log_message = lambda *_: None
    service.RequestHandlerClass.do_GET = lambda handler: handler.send_error(404)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{service.server_port}")
    yield service
    service.shutdown()
    service.server_close()


def statuses(tracking):
    return {found.check: found.status for found in check_wandb(tracking)}


def test_a_server_that_answers_and_a_key_are_fine_and_the_key_stays_secret(server, monkeypatch):
    assert statuses(ONLINE) == {"W&B key": "warning", "W&B server": "ok"}
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 3)
    assert statuses(ONLINE) == {"W&B key": "ok", "W&B server": "ok"}
    assert not any("0123456789" in str(found) for found in check_wandb(ONLINE))


def test_a_key_of_the_netrc_counts_for_its_own_host_only(server, tmp_path):
    path = tmp_path / ".netrc"
    path.write_text("machine 127.0.0.1\n  login user\n  password 0123456789abcdef\n")
    path.chmod(0o600)
    assert statuses(ONLINE)["W&B key"] == "ok"
    assert not any("0123456789" in str(found) for found in check_wandb(ONLINE))
    path.write_text("machine other.host\n  login user\n  password 0123456789abcdef\n")
    assert statuses(ONLINE)["W&B key"] == "warning"


def test_a_server_that_does_not_answer_is_a_warning_and_offline_runs_need_none(no_key, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert statuses(ONLINE)["W&B server"] == "warning"
    assert statuses(TrackingConfig()) == {"W&B": "not applicable"}
    assert statuses(None) == {"W&B": "not applicable"}
