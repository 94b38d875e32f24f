"""A deployment as a shell script for machines of one's own: no scheduler, no cluster, one run of it a machine."""

import shlex

from rackplan.engine.deployment import Deployment
from rackplan.engine.placement import Placement
from rackplan.engine.pods import lines_of
from rackplan.engine.router_config import Address, needs_router, router_json
from rackplan.engine.serving import ServerCommand, server_commands

_HEAD = """\
#!/usr/bin/env bash
# Starts the servers of one machine, logs to logs/, and stays until one of them ends; then it ends the others.
# Usage: bash serve.sh [MACHINE]   MACHINE: 0 (default) to {last}, in the order of --hosts.
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
mkdir -p logs
children=()
start() {{
  local name=$1
  shift
  "$@" >>"logs/$name.log" 2>&1 &
  children+=("$!")
  echo "$name: process $!, logs/$name.log"
}}
finish() {{
  trap - EXIT
  kill "${{children[@]}}" 2>/dev/null || true
  wait
}}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
case ${{1:-0}} in
"""
_TAIL = """\
*)
  echo "serve.sh: machine $1: unknown; 0 to {last}" >&2
  exit 2
  ;;
esac
wait -n
"""


def shell_files(deployment: Deployment, placement: Placement, port: int) -> tuple[dict[str, str], int]:
    """serve.sh, and router.json where a router is needed, by name; and how many machines they are for.
    `port`: where requests come in where there is a router."""
    servers = server_commands(deployment, placement)
    machines = range(1 + max(s.machine for s in servers))
    routed = needs_router(deployment)
    text = _HEAD.format(last=machines[-1])
    for machine in machines:
        text += f"{machine})\n" + "".join(_start(s) for s in servers if s.machine == machine)
        if routed and machine == 0:
            text += "start router python3 -m rackplan.engine.router router.json\n"
        text += ";;\n"
    files = {"serve.sh": text + _TAIL.format(last=machines[-1])}
    if routed:
        files["router.json"] = _router(deployment, placement, servers, port)
    return files, len(machines)


def _start(server: ServerCommand) -> str:
    env = [f"{name}={shlex.quote(value)}" for name, value in server.env.items()]
    return lines_of(["start", server.name, "env", *env, *map(shlex.quote, server.argv)])


def _router(deployment: Deployment, placement: Placement, servers: tuple[ServerCommand, ...], port: int) -> str:
    hosts = placement.hosts or (placement.host,)
    ranks = {s.name: int(s.argv[s.argv.index("--data-parallel-size") + 1]) for s in servers}
    addresses = [
        Address(role=s.role, url=f"http://{hosts[s.machine]}:{s.port}", ranks=ranks[s.name]) for s in servers if s.port
    ]
    return router_json(deployment, addresses, host=hosts[0], port=port)
