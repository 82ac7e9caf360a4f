"""Whether all nodes would run the same: versions, settings and data, told to each other before training starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gnmr_megatron
from gnmr_megatron.data.manifest import MANIFEST, describe_datasets
from gnmr_megatron.data.tokenizer import file_hash
from gnmr_megatron.errors import ConfigError, GnmrError
from gnmr_megatron.training.checkpoint_files import DESCRIPTION
from gnmr_megatron.training.config import RunConfig, validate
from gnmr_megatron.training.initial_weights import base_weights, initial_weights

PROBLEM = "cannot start"
_EDGE_BYTES = 1 << 20
_MOST_LINES = 20
_MOST_NODES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where nodes meet: a c10d rendezvous, as torchrun's.

    Attributes:
        nodes: how many come.
        endpoint: host and port of the store, on one of them.
        run_id: name of the meeting.
        options: torchrun's `--rdzv-conf`, such as `is_host`.
    """

    nodes: int
    endpoint: str
    run_id: str
    options: Mapping[str, str]


def node_facts(config: RunConfig, *, world_size: int) -> dict[str, str]:
    """What has to be equal on all nodes, by name.

    Of the data: the manifest, sizes, the whole index (.idx), and the first and last MiB of the tokens (.bin). That
    finds another dataset and a copy that was cut off, and reads little; it does not find single bytes that changed
    in the middle.

    Raises:
        GnmrError: settings or data are refused on this node.
    """
    data = describe_datasets(config.data)
    validate(config, world_size=world_size, vocab_size=data.vocab_size)
    initial = initial_weights(config, data) if config.resume is None else None
    base = base_weights(config, data)
    facts = version_facts()
    facts.update(_flat(dataclasses.asdict(config)))
    facts["tokenizer"] = data.tokenizer_fingerprint[:16]
    if initial is not None:
        facts["init_from (checkpoint.json)"] = file_hash(initial / DESCRIPTION)[:16]
    if base is not None:
        facts["lora.base (checkpoint.json)"] = file_hash(base / DESCRIPTION)[:16]
    for prefix in (*data.prefixes, *data.mask_prefixes):
        facts[f"data in {prefix}"] = data_hash(prefix)
    return facts


def version_facts() -> dict[str, str]:
    """Versions that have to be equal on all nodes, by name."""
    facts = {"python": platform.python_version(), "gnmr_megatron source": _source_hash()}
    for package in ("gnmr-megatron", "megatron-core", "torch", "transformer-engine"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def data_hash(prefix: Path) -> str:
    """Hash of a dataset by what is cheap to read of it; see `node_facts`."""
    index, tokens = (prefix.with_name(prefix.name + ending) for ending in (".idx", ".bin"))
    with index.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    manifest = prefix.parent / MANIFEST
    if manifest.exists():
        digest.update(manifest.read_bytes())
    size = tokens.stat().st_size
    digest.update(str(size).encode())
    with tokens.open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(size - _EDGE_BYTES, 0))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def compare_nodes(facts: Mapping[str, str], meeting: Meeting) -> None:
    """Meet the other nodes and compare; all of them raise alike.

    Raises:
        ConfigError: something differs; names it and the nodes.
        GnmrError: the nodes did not meet.
    """
    reports = _meet(facts, meeting)
    problems = [
        f"{node}: {facts[PROBLEM]}" for node, facts in reports if facts.get(PROBLEM) is not None
    ]
    problems = problems or list(differences(reports))
    if problems:
        more = len(problems) - _MOST_LINES
        shown = problems[:_MOST_LINES] + ([f"and {more} more"] if more > 0 else [])
        raise ConfigError(
            "nodes differ, so none starts; make them equal (a shared file system does) and start again:\n"
            + "\n".join(f"  {line}" for line in shown)
        )


def differences(reports: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """One line for each fact that is not the same everywhere: the commonest value first, with its nodes.

    Args:
        reports: name and facts of each node.
    """
    for name in dict.fromkeys(name for _, facts in reports for name in facts):
        holders: dict[str, list[str]] = {}
        for node, facts in reports:
            holders.setdefault(facts.get(name, "absent"), []).append(node)
        if len(holders) > 1:
            groups = sorted(holders.items(), key=lambda item: -len(item[1]))
            yield f"{name}: " + "; ".join(f"{value} on {_some(nodes)}" for value, nodes in groups)


def _some(nodes: Sequence[str]) -> str:
    more = len(nodes) - _MOST_NODES
    return ", ".join(nodes[:_MOST_NODES]) + (f" and {more} more" if more > 0 else "")


def _meet(facts: Mapping[str, str], meeting: Meeting) -> list[tuple[str, Mapping[str, str]]]:
    """Name and facts of every node."""
    # imported here: one node needs no torch, and torch reads the variable when it is loaded. What it logs of a
    # connection that fails, two pages of addresses, is told below in a line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    try:
        handler = get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=meeting.endpoint,
                run_id=meeting.run_id,
                min_nodes=meeting.nodes,
                max_nodes=meeting.nodes,
                **meeting.options,
            )
        )
        place = handler.next_rendezvous()
        dist.init_process_group(
            "gloo", store=place.store, rank=place.rank, world_size=place.world_size
        )
        reports: list[Any] = [None] * place.world_size
        dist.all_gather_object(reports, (socket.gethostname(), os.getpid(), facts))
        dist.barrier()  # the node with the store leaves when all have what they need
        dist.destroy_process_group()
    except (RendezvousError, RuntimeError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise GnmrError(
            f"{meeting.nodes} nodes did not meet at {meeting.endpoint} ({reason}); check that all were started, that "
            "HEAD_ADDR is the same everywhere and its ports are open, and the interface (NIC)"
        ) from error
    hosts = Counter(host for host, _, _ in reports)
    return [
        (host if hosts[host] == 1 else f"{host} (process {process})", facts)
        for host, process, facts in reports
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted key."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, default=str)
    return flat


def _source_hash() -> str:
    """Hash of the package's own files: two checkouts may have one version."""
    root = Path(gnmr_megatron.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
