"""Ports at which processes meet, names and interfaces of this machine, and W&B."""

from __future__ import annotations

import errno
import netrc
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from gnmr_megatron.observability.config import TrackingConfig
from gnmr_megatron.training.checkup.findings import NETWORK, Finding

DEFAULT_PORT = 29500  # torchrun's; the launch scripts use the one above it, too
WANDB = "https://api.wandb.ai"
_SECONDS = 3.0


def check_ports(endpoint: str | None, *, nodes: int) -> Iterator[Finding]:
    """Whether processes can meet at `HOST:PORT`, or at torchrun's port on this machine.

    Args:
        endpoint: where they are told to meet; None for the default port, which only runs of several nodes need.
        nodes: of the run.
    """
    host, _, port_text = (endpoint or "").rpartition(":")
    host = host.strip("[]") or "localhost"
    if endpoint is not None and not (port_text.isdigit() and 0 < int(port_text) < 65535):
        yield NETWORK.problem(
            "rendezvous", f"'{endpoint}' is no HOST:PORT", "give one, such as node1:29500"
        )
        return
    first = int(port_text) if endpoint is not None else DEFAULT_PORT
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, first)}
    except OSError as error:
        yield NETWORK.problem(
            "rendezvous",
            f"the name {host} is not known here ({error.strerror})",
            "give an address instead, or add the name to DNS or /etc/hosts",
        )
        return
    is_required = endpoint is not None or nodes > 1
    for port in (first, first + 1):
        if addresses & own_addresses():
            yield free_port(port, is_required=is_required)
        else:
            yield _reachable(host, port)


def free_port(port: int, *, is_required: bool) -> Finding:
    """Whether a port of this machine can be bound."""
    check = f"port {port}"
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104  # as torchrun's store does
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((host, port))
                trial.listen(1)
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # no IPv6 here
            detail = f"cannot be used ({error.strerror}){_holder(port)}"
            advice = "end that process, or choose another port (RDZV_PORT, --rdzv-endpoint)"
            if is_required:
                return NETWORK.problem(check, detail, advice)
            return NETWORK.warning(check, f"{detail}; runs of one node need none", advice)
    return NETWORK.ok(check, "free")


def own_addresses() -> set[str]:
    """Addresses of this machine's interfaces."""
    return {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def check_names(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether this machine knows its own name, and has the interfaces that it is told to use."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        yield NETWORK.ok("own name", name)
    except OSError as error:
        yield NETWORK.warning(
            "own name",
            f"{name} has no address here ({error.strerror})",
            "add it to /etc/hosts, or give torchrun --local-addr (the launch scripts do, on one node)",
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if variable in environment:
            yield known_interface(variable, environment[variable])


def known_interface(variable: str, value: str) -> Finding:
    """Whether the interfaces of a variable are there; NCCL takes prefixes and signs before them."""
    there = [name for name, state in psutil.net_if_stats().items() if state.isup]
    is_exact, is_excluded = value.startswith("="), value.startswith("^")
    wanted = [name for name in value.lstrip("^=").split(",") if name]
    missing = [
        name
        for name in wanted
        if not any(
            found == name
            or (not is_exact and variable.startswith("NCCL") and found.startswith(name))
            for found in there
        )
    ]
    if missing and not is_excluded:
        return NETWORK.problem(
            variable,
            f"{', '.join(missing)}: no interface of this name is up",
            f"set it to one of {', '.join(sorted(there))}",
        )
    return NETWORK.ok(variable, value)


def check_wandb(tracking: TrackingConfig | None) -> Iterator[Finding]:
    """Whether W&B has a key and, for runs that are online, can be reached. The key itself is not read out."""
    url = os.environ.get("WANDB_BASE_URL", WANDB)
    place = _key_place(urlsplit(url).hostname or "")
    key = f"a key is there ({place})" if place else "no key is there"
    if tracking is None or tracking.wandb_mode != "online":
        mode = (
            "no run is looked at"
            if tracking is None
            else f"tracking.wandb_mode: {tracking.wandb_mode}"
        )
        yield NETWORK.not_applicable("W&B", f"{mode}; {key}")
        return
    if place is None:
        yield NETWORK.warning(
            "W&B key",
            f"{key}, and tracking.wandb_mode is online",
            "wandb login, or set WANDB_API_KEY; or tracking.wandb_mode: offline and wandb sync later",
        )
    else:
        yield NETWORK.ok("W&B key", key)
    yield _wandb_answers(url)


def _wandb_answers(url: str) -> Finding:
    try:
        urllib.request.urlopen(url, timeout=_SECONDS).close()  # noqa: S310  # W&B's own setting
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return NETWORK.warning(
            "W&B server",
            f"{url} does not answer ({reason})",
            "open the way to it (HTTPS_PROXY), or set tracking.wandb_mode: offline and wandb sync later",
        )
    return NETWORK.ok("W&B server", f"{url} answers")


def _key_place(host: str) -> str | None:
    """Where W&B would find a key."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if not path:
            continue
        try:
            if netrc.netrc(Path(path).expanduser()).authenticators(host) is not None:
                return path
        except (OSError, netrc.NetrcParseError):
            continue
    return None


def _holder(port: int) -> str:
    """Who listens at a port, where that can be told."""
    try:
        connections = psutil.net_connections("tcp")
        (pid, *_) = (
            connection.pid
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == port
            and connection.pid
        )
        return f", {psutil.Process(pid).name()} (process {pid}) listens at it"
    except (psutil.Error, OSError, ValueError):
        return ""


def _reachable(host: str, port: int) -> Finding:
    """Whether a port of another machine answers, if only to say that nobody listens yet."""
    check = f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except ConnectionRefusedError:
        return NETWORK.ok(check, "the machine answers; nobody listens there yet")
    except OSError as error:
        return NETWORK.problem(
            check,
            f"cannot be reached ({error.strerror or error})",
            "check that the machine is up and that no firewall closes the port",
        )
    return NETWORK.ok(check, "answers")
