"""Does the simulator rank deployments as the engine does? Every split of the GPUs, at two token budgets, under the same
loads. Run: `order.py order8192 --gpus N [--only NAME...]` prints the plan's servers, routers last; `--out DIR` also
writes DIR/NAME.yaml, each deployment as rackplan simulates it.

One plan a budget: `order8192` and `order2048`. Servers of all its deployments are up at once; only those of one are
under load. P/D splits share their servers: the first GPUs hold a prefill server, the last a decode server, as many as
any split wants, and each split has a router of its own. Where several addresses take requests, rackplan's router sends
each to that with the fewest.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from parts import Load, Server, aggregated, dep, nixl

from rackplan.engine import Deployment, parse_deployment
from rackplan.engine.memory import plan_memory
from rackplan.engine.router_config import Address, needs_router, router_json

PORTS = {8192: 9100, 2048: 9300}
"""First port by token budget; a budget takes a hundred."""
PLANS = {f"order{tokens}": tokens for tokens in PORTS}
KV_GIB = 8
MAX_MODEL_LEN, MAX_NUM_SEQS, CAPTURED = 8192, 512, 512
RATES_PER_GPU = {6: 150, 3: 90}
"""Prompts a GPU by rate a GPU, req/s: 25 to 30 s of arrivals. The first tells most."""
TURNS = 2
SEED = 5000


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """One deployment. `servers`: names of its servers by role, as its step logs are named; `port`: where requests go;
    `router`: the name of its router, None where its one server balances by itself."""

    name: str
    deployment: Deployment
    servers: dict[str, str]
    port: int
    router: str | None


def splits(gpus: int) -> list[tuple[int, int]]:
    """(prefill, decode) instances of one GPU: in quarters of the GPUs, or one each of two."""
    step = max(1, gpus // 4)
    return [(p, gpus - p) for p in range(step, gpus, step)]


def order_servers(gpus: int) -> dict[str, Server]:
    """Of both plans, by name."""
    found = {}
    for tokens, port in PORTS.items():
        most = max(p for p, _ in splits(gpus))
        for i in range(gpus):
            found[f"agg{i}_b{tokens}"] = aggregated(i, port + i, tokens, CAPTURED, KV_GIB)
            if i < most:
                found[f"prefill{i}_b{tokens}"] = nixl(i, port + 10 + i, "kv_producer", tokens)
            if i >= gpus - most:
                found[f"decode{i}_b{tokens}"] = nixl(i, port + 20 + i, "kv_consumer", tokens)
        found[f"dep_b{tokens}"] = dep(gpus, port + 40, tokens=tokens)
    return found


def deployment_of(tokens: int, *pools: tuple[str, int, int], pull: bool = False) -> Deployment:
    """Pools of (role, instances, dep), whose gpu_memory_utilization leaves as much KV as the servers are given."""
    sizes = {"max_num_batched_tokens": tokens, "max_num_seqs": MAX_NUM_SEQS, "enable_prefix_caching": False}
    named = [dict(zip(("role", "instances", "dep"), p, strict=True)) | sizes for p in pools]
    data = {"model": "deepseek-v2-lite", "gpu": "h200", "max_model_len": MAX_MODEL_LEN, "pools": named}
    data |= {"router": {"policy": "least_requests"}} | ({"kv_transfer": {"mode": "pull"}} if pull else {})
    deployment = parse_deployment(data)
    shares = []
    for pool in deployment.pools:
        plan = plan_memory(deployment, pool)
        shares.append(round(pool.gpu_memory_utilization - (plan.kv_pool_gib - KV_GIB) / plan.hbm_gib, 5))
    filled = [p | {"gpu_memory_utilization": share} for p, share in zip(named, shares, strict=True)]
    return parse_deployment(data | {"pools": filled})


def ordered(plan: str, gpus: int) -> list[Ordered]:
    """The deployments of a plan: P/D splits, one-GPU instances side by side, one instance over all GPUs."""
    tokens = PLANS[plan]
    port = PORTS[tokens]
    found = []
    for i, (p, d) in enumerate(splits(gpus)):
        roles = {f"prefill-{j}": f"prefill{j}_b{tokens}" for j in range(p)}
        roles |= {f"decode-{j}": f"decode{gpus - d + j}_b{tokens}" for j in range(d)}
        deployment = deployment_of(tokens, ("prefill", p, 1), ("decode", d, 1), pull=True)
        found.append((f"{p}p{d}d", deployment, roles, port + 30 + i))
    each = {f"aggregated-{i}": f"agg{i}_b{tokens}" for i in range(gpus)}
    found.append((f"{gpus}xdep1", deployment_of(tokens, ("aggregated", gpus, 1)), each, port + 39))
    wide = {"aggregated-0": f"dep_b{tokens}"}
    found.append((f"dep{gpus}", deployment_of(tokens, ("aggregated", 1, gpus)), wide, port + 40))
    return [
        Ordered(
            name=f"{name}_b{tokens}",
            deployment=deployment,
            servers=roles,
            port=at,
            router=f"router_{name}_b{tokens}" if needs_router(deployment) else None,
        )
        for name, deployment, roles, at in found
    ]


def routers(gpus: int) -> dict[str, Ordered]:
    """Of both plans, by name."""
    return {o.router: o for plan in PLANS for o in ordered(plan, gpus) if o.router}


def router_config(of: Ordered, gpus: int) -> str:
    """What `python -m rackplan.engine.router` reads."""
    port = {name: s.port for name, s in order_servers(gpus).items()}
    ranks = {p.role: p.dep for p in of.deployment.pools}
    addresses = []
    for server, name in of.servers.items():
        role = next(r for r in ranks if server.startswith(r))
        addresses.append(Address(role=role, url=f"http://127.0.0.1:{port[name]}", ranks=ranks[role]))
    return router_json(of.deployment, addresses, host="127.0.0.1", port=of.port)


def order_loads(gpus: int) -> dict[str, list[Load]]:
    """By plan: a warm-up of each deployment; then, in turns, each rate on all of them, one after the other, so that
    what is compared lies near in time. A rate's prompts and arrivals are always the same: what its repeats differ by is
    the measurement's own."""
    found = {}
    for plan in PLANS:
        those = ordered(plan, gpus)
        few = {"rate": 15 * gpus, "prompts": 12 * gpus, "seed": SEED, "metrics": (), "kept": False}
        found[plan] = [Load(name=f"{o.name}_warm", port=o.port, **few) for o in those]
        found[plan] += [
            Load(
                name=f"{o.name}_r{rate * gpus}_{turn}",
                port=o.port,
                rate=rate * gpus,
                prompts=prompts * gpus,
                seed=SEED + 1 + i,
                metrics=tuple(o.servers.values()),
            )
            for turn in range(1, TURNS + 1)
            for i, (rate, prompts) in enumerate(RATES_PER_GPU.items())
            for o in those
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="deployments, as 1p1d_b8192")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    those = [o for o in ordered(args.plan, args.gpus) if not args.only or o.name in args.only]
    for o in those if args.out else ():
        (args.out / f"{o.name}.yaml").write_text(o.deployment.to_yaml())
    servers = dict.fromkeys(name for o in those for name in o.servers.values())
    print(*servers, *(o.router for o in those if o.router))


if __name__ == "__main__":
    main()
