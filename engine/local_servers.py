"""What a deployment on this machine consists of: its servers' commands, its router's, and what must hold before."""

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rackplan.engine.deploy_state import Launch, Record
from rackplan.engine.errors import InfeasibleError, InputError
from rackplan.engine.files import write_all
from rackplan.engine.machine import engine_release, query_gpus
from rackplan.engine.memory import GIB, check_memory
from rackplan.engine.router_config import Address, needs_router, router_json
from rackplan.engine.servers import processes_of
from rackplan.engine.serving import Placement, ServerCommand, server_commands

ROUTER = "router"
VLLM = ("-m", "vllm.entrypoints.cli.main")
"""vLLM's command by the interpreter that has it, in place of a `vllm` that may be another's."""
FIRST_PORT_ABOVE = 100
"""Instances answer this far above the deployment's own port where a router has that."""
CPU_RUNTIME_GIB = 2.0
"""A CPU server beyond its weights and KV: PyTorch, vLLM, buffers. A factor; 1.4 to 2 GiB were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCommand:
    """One process to start. `url`: where it answers."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str | None


def placement_of(launch: Launch, id: str, folder: Path) -> Placement:
    """Where the servers of `launch` run: this machine, all of its devices, step logs in `folder`."""
    routed = needs_router(launch.deployment)
    return Placement(
        device=launch.device,
        engine_version=launch.engine_version,
        model=launch.model,
        host=launch.host,
        first_port=launch.port + FIRST_PORT_ABOVE if routed else launch.port,
        devices_per_node=launch.deployment.gpus,
        log_dir=str(folder),
        revision=id,
    )


def local_commands(launch: Launch, id: str, folder: Path) -> list[LocalCommand]:
    """The processes of `launch`, servers first. Writes the router's configuration into `folder`."""
    servers = server_commands(launch.deployment, placement_of(launch, id, folder))
    commands = [_of_server(s, launch) for s in servers]
    if needs_router(launch.deployment):
        path = folder / f"{ROUTER}.json"
        addresses = [_address(launch, s) for s in servers if s.port]
        write_all({path: router_json(launch.deployment, addresses, host=launch.host, port=launch.port)})
        commands.append(
            LocalCommand(
                name=ROUTER,
                argv=(sys.executable, "-m", "rackplan.engine.router", str(path)),
                env={},
                url=f"http://{launch.host}:{launch.port}",
            )
        )
    return commands


def _address(launch: Launch, server: ServerCommand) -> Address:
    ranks = {p.role: p.dep for p in launch.deployment.pools}
    return Address(role=server.role, url=f"http://{launch.host}:{server.port}", ranks=ranks[server.role])


def _of_server(server: ServerCommand, launch: Launch) -> LocalCommand:
    return LocalCommand(
        name=server.name,
        argv=(launch.python, *VLLM, *server.argv[1:]),
        env=server.env,
        url=f"http://{launch.host}:{server.port}" if server.port else None,
    )


# -- before anything is touched --------------------------------------------------------------------------------------
def preflight(launch: Launch, replaced: Record | None) -> None:
    """Raises InputError or InfeasibleError where `launch` could not run here once `replaced` is gone."""
    plans = check_memory(launch.deployment)
    # Every flag is known.
    servers = server_commands(launch.deployment, placement_of(launch, "preflight", Path(os.devnull)))
    _check_engine(launch)
    _check_ports(launch, servers, replaced)
    if launch.device == "cpu":
        need_gib = sum(
            (p.usable_gib - p.runtime_gib + CPU_RUNTIME_GIB) * pool.gpus
            for p, pool in zip(plans, launch.deployment.pools, strict=True)
        )
        _check_memory_of_host(need_gib, replaced)
    else:
        _check_gpus(launch, replaced)


def _check_engine(launch: Launch) -> None:
    if (found := engine_release(launch.python)) != launch.engine_version:
        raise InputError(f"--python {launch.python}: has vLLM {found}, the deployment is for {launch.engine_version}")


def _check_ports(launch: Launch, servers: tuple[ServerCommand, ...], replaced: Record | None) -> None:
    ours = {p.pid for p in processes_of(replaced.id)} if replaced else set()
    for port in sorted({launch.port, *(s.port for s in servers if s.port)}):
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((launch.host, port))
                continue
            except OSError:
                pass
        if not ours & set(_listeners(port)):
            raise InputError(f"--port {launch.port}: {launch.host}:{port} is in use; give another")


def _listeners(port: int) -> Iterator[int]:
    """Processes that listen on `port`, as far as this user may know."""
    for c in psutil.net_connections("tcp"):
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid:
            yield c.pid


def _check_memory_of_host(need_gib: float, replaced: Record | None) -> None:
    freed = sum(p.memory_info().rss for p in processes_of(replaced.id)) if replaced else 0
    have_gib = (psutil.virtual_memory().available + freed) / GIB
    if need_gib > have_gib:
        raise InfeasibleError(
            f"the deployment takes {need_gib:.1f} GiB of memory, the machine has {have_gib:.1f} GiB free; "
            f"lower gpu_memory_utilization or the number of instances"
        )


def _check_gpus(launch: Launch, replaced: Record | None) -> None:
    lines = query_gpus("name,memory.total,memory.used")
    if len(lines) < launch.deployment.gpus:
        raise InfeasibleError(
            f"the deployment takes {launch.deployment.gpus} GPUs, the machine has {len(lines)}: "
            f"render it for a cluster with --target"
        )
    if replaced is not None:
        return  # what it holds is freed first, and nobody can tell its share of a GPU from others'
    for i, line in enumerate(lines[: launch.deployment.gpus]):
        name, total, used = (x.strip() for x in line.split(","))
        share = max(p.gpu_memory_utilization for p in launch.deployment.pools)
        if float(used) > (1 - share) * float(total):
            raise InfeasibleError(
                f"GPU {i} ({name}): {float(used) / 1024:.1f} of {float(total) / 1024:.1f} GiB are in use, and "
                f"gpu_memory_utilization={share:g} wants the rest; end what uses it or lower the share"
            )


def describe(record: Record) -> str:
    """One line: what a deployment consists of."""
    parts = [f"{p.instances} x {p.role} DEP{p.dep}" for p in record.launch.deployment.pools]
    return f"{' + '.join(parts)} of {json.dumps(record.launch.model)}"
