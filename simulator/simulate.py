"""Run a deployment on a workload: the one entry to the simulator.

A request's way: arrival -> front end -> router -> prefill instance -> KV hand-over -> decode instance -> end, or
arrival -> front end -> router -> aggregated instance -> end.
"""

from array import array
from dataclasses import dataclass, replace

import numpy as np

from rackplan.engine import Deployment, InputError, MemoryPlan, Pool, check_memory
from rackplan.simulator.acceptance import Acceptance
from rackplan.simulator.adaptive import Verification
from rackplan.simulator.block_cache import BlockCache
from rackplan.simulator.clock import Clock, Process, Sleeps
from rackplan.simulator.cost import STEADY, Calibration
from rackplan.simulator.eplb_run import eplb_of, served_by
from rackplan.simulator.failures import check_failures
from rackplan.simulator.faults import Faults
from rackplan.simulator.frontend import TURNS
from rackplan.simulator.garbage import no_collections
from rackplan.simulator.instance import Instance, TokenGaps
from rackplan.simulator.instance_model import InstanceModel
from rackplan.simulator.kv_transfer import KvTransfers
from rackplan.simulator.launches import DrawnLaunches
from rackplan.simulator.load import Load, Source, Workload
from rackplan.simulator.lossy_transfer import LossyTransfers
from rackplan.simulator.pool import PoolOfInstances
from rackplan.simulator.prefix_cache import SessionCache
from rackplan.simulator.request import NS_PER_MS, NS_PER_S, Request
from rackplan.simulator.router import LeastRequests, make_router
from rackplan.simulator.run_options import RunOptions
from rackplan.simulator.sequence import Sequence
from rackplan.simulator.streams import Streams

COLUMNS = 8
"""What is kept of each request that has ended."""


@dataclass(slots=True, kw_only=True)
class PoolRun:
    """What one pool did in the measured time. `gpu_ns`: GPU time by cause; `token_gaps`: by instance."""

    pool: Pool
    gpu_ns: dict[str, float]
    busy_share: float
    token_gaps: list[TokenGaps]
    most_admitted_in_a_step: int
    preemptions: int


@dataclass(slots=True, kw_only=True)
class SimResult:
    """One run. Arrays are (finished requests,) in order of their ends; times are integer ns.

    `submitted` = len(finish_ns) + `rejected` + `failed` + `unfinished`: every arrival has one outcome. `failures`: how
    many instances were to be lost.
    """

    deployment: Deployment
    memory: list[MemoryPlan]
    arrival_ns: np.ndarray
    first_token_ns: np.ndarray
    finish_ns: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    cached_tokens: np.ndarray
    scheduled_ns: np.ndarray
    request_id: np.ndarray
    pools: list[PoolRun]
    submitted: int
    rejected: int
    unfinished: int
    measured_from_ns: int
    measured_to_ns: int
    drained: bool
    failed: int = 0
    failures: int = 0
    transfers: int = 0
    transfer_wait_ns: int = 0
    transfer_ns: int = 0


def simulate(
    deployment: Deployment, workload: Workload, load: Load, calibration: Calibration, options: RunOptions
) -> SimResult:
    """Simulate. Raises InfeasibleError when a pool does not fit its GPUs, InputError when nothing arrives."""
    memory = check_memory(deployment)
    with no_collections():
        return _Run(deployment, memory, workload, load, calibration, options).run()


class _Run:
    def __init__(
        self,
        deployment: Deployment,
        memory: list[MemoryPlan],
        workload: Workload,
        load: Load,
        calibration: Calibration,
        options: RunOptions,
    ) -> None:
        self.deployment, self.memory, self.options = deployment, memory, options
        streams = self.streams = Streams(options.seed)
        self.env = Clock()
        self.source: Source = workload.source(load, options.duration_s, streams)
        turns_ms = TURNS * calibration.frontend_turn_ms if calibration.frontend_token_ms else 0.0
        self.frontend_ns = round(max(0.0, calibration.frontend_ms - turns_ms) * NS_PER_MS)
        self._all_done = self.env.event()
        self._no_more = False
        self.submitted = self.rejected = self.failed = self.in_flight = 0
        self.ended = array("q")  # a row of COLUMNS each
        self.limit_tokens = min([deployment.context_limit, *(m.kv_tokens for m in memory)])
        drafts = deployment.speculation.draft_tokens
        length = deployment.model_spec.acceptance_length(drafts, thinking=options.drafting.thinking)
        acceptance = Acceptance(drafts, length, streams, options.drafting.acceptance_spread)
        hashed = getattr(workload, "hashed", False)  # do its requests state their blocks?
        self._runs_out = getattr(workload, "runs_out", False)
        router = make_router(deployment.router, streams)
        plans = zip(deployment.pools, memory, strict=True)
        models = [self._models(calibration, pool, plan, acceptance, hashed) for pool, plan in plans]
        flat = [m for group in models for m in group]
        entry = [m for m in flat if m.pool.role != "decode"]
        self.entry = PoolOfInstances(self.env, entry, router, self._prefilled, self._finished)
        self.transfers: KvTransfers | None = None
        self.pools = [self.entry]
        if deployment.disaggregated:
            decode = [m for m in flat if m.pool.role == "decode"]
            # A decode rank has no prefix to prefer: KV comes whole, so load alone counts.
            pool = PoolOfInstances(self.env, decode, LeastRequests(), self._prefilled, self._finished)
            self.pools.append(pool)
            self.transfers = (LossyTransfers if options.failures else KvTransfers)(
                self.env,
                calibration.transfer_cost(deployment),
                deployment.model_spec,
                deployment.kv_transfer.mode,
                pool,
            )
        self.faults = self._faults() if options.failures else None

    def _faults(self) -> Faults:
        options, deployment = self.options, self.deployment
        check_failures(options.failures, deployment, options.duration_s)
        roles = ("prefill", "decode") if deployment.disaggregated else ("aggregated",)
        return Faults(
            self.env,
            dict(zip(roles, self.pools, strict=True)),
            self.transfers if isinstance(self.transfers, LossyTransfers) else None,
            options.failures,
            resubmit=options.resubmit,
            send=self._send,
            on_failed=self._failed,
        )

    def _models(
        self, calibration: Calibration, pool: Pool, plan: MemoryPlan, acceptance: Acceptance, hashed: bool
    ) -> list[InstanceModel]:
        deployment, model = self.deployment, self.deployment.model_spec
        served, verification = served_by(calibration, deployment, pool), None
        if deployment.speculation.enable_adaptive_verification and pool.role != "prefill":
            verification = Verification(calibration, deployment, pool, self.options.drafting, self.options.seed)
            served, acceptance = verification.served, verification.acceptances[-1]
        own = served(STEADY)
        one = InstanceModel(
            pool=pool,
            cost=own.cost,
            kv_tokens=plan.kv_tokens,
            # A prefill pool samples one token and drafts nothing.
            acceptance=acceptance if pool.role != "prefill" else Acceptance(0, 1.0, Streams(0)),
            replay_tokens=model.replay_tokens_per_hit,
            balancedness=own.balancedness,
            make_cache=BlockCache if hashed else SessionCache,
            eplb=eplb_of(calibration, deployment, pool, served, self.options.experts),
            coalesce=self.options.coalesce,
            frontend_token_ms=calibration.frontend_token_ms,
            frontend_turn_ms=calibration.frontend_turn_ms,
            kv_offloading_tokens=plan.kv_offloading_tokens,
            kv_bytes_per_token=model.kv_bytes_per_token,
            host_gb_s=deployment.gpu_spec.host_gb_s,
            verification=verification,
        )
        if not one.cost.launch_quantiles:
            return [one] * pool.instances
        streams = (self.streams[f"launches {pool.role} {i}"] for i in range(pool.instances))
        return [replace(one, cost=DrawnLaunches(one.cost, stream)) for stream in streams]

    # -- requests ------------------------------------------------------------------------------------------------
    def run(self) -> SimResult:
        env, options = self.env, self.options
        self._prime()
        Process(env, self._arrive())
        warmup_ns = round(options.warmup_s * NS_PER_S)
        if warmup_ns:
            env.run(until=warmup_ns)
            for instance in self._instances():
                instance.start_measuring()
        if options.drain:
            env.run(until=self._all_done)
        else:
            left_ns = max(1, round(options.duration_s * NS_PER_S) - env.now_ns)
            end = env.timeout(left_ns)
            env.run(until=end | self._all_done if self._runs_out else end)
        for instance in self._instances():
            instance.stop_measuring()
        return self._result(warmup_ns)

    def _prime(self) -> None:
        """Prefixes that are in the cache before time 0, dealt to the ranks in turn."""
        for i, (session, tokens) in enumerate(self.source.primed()):
            self.entry.prime(i, Request(-1, 0, tokens, 0, session=session))

    def _arrive(self) -> Sleeps:
        for request in self.source.arrivals():
            wait = request.arrival_ns + self.frontend_ns - self.env.now_ns
            if wait > 0:
                yield wait
            self.in_flight += 1
            self._submit(request)
        self._no_more = True
        self._check_done()

    def _submit(self, request: Request) -> None:
        self.submitted += 1
        if request.input_tokens + request.output_tokens > self.limit_tokens:
            self.rejected += 1
            self._leave(request)
            return
        self._send(request)

    def _failed(self, request: Request) -> None:
        self.failed += 1
        self._leave(request)

    def _send(self, request: Request) -> None:
        if self.faults is not None and self.faults.holds(request):
            return
        instance, rank, load_tokens = self.entry.choose(request)
        instance.receive(Sequence(request, rank, self.env.now_ns, request.input_tokens, load_tokens))

    def _prefilled(self, seq: Sequence, instance: Instance) -> None:
        assert self.transfers is not None
        self.transfers.hand_over(seq, instance)

    def _finished(self, seq: Sequence, instance: Instance) -> None:
        r = seq.request
        self.ended.extend(
            (
                r.arrival_ns,
                seq.first_token_ns,
                self.env.now_ns,
                r.input_tokens,
                r.output_tokens,
                seq.cached_tokens,
                seq.scheduled_ns,
                r.id,
            )
        )
        self._leave(r)

    def _leave(self, request: Request) -> None:
        self.in_flight -= 1
        for following in self.source.finished(request, self.env.now_ns):
            self.in_flight += 1  # before it comes, so that the run does not end
            self.env.after(following.arrival_ns + self.frontend_ns - self.env.now_ns, self._submit, following)
        if self._no_more:
            self._check_done()

    def _check_done(self) -> None:
        if self.in_flight == 0 and not self._all_done.triggered:
            self._all_done.succeed()

    # -- result --------------------------------------------------------------------------------------------------
    def _instances(self) -> list[Instance]:
        return [i for pool in self.pools for i in pool.instances]

    def _result(self, warmup_ns: int) -> SimResult:
        if not self.submitted:
            raise InputError(f"--duration={self.options.duration_s:g}s: no request arrived; raise it or --rate")
        columns = np.frombuffer(self.ended, np.int64).reshape(-1, COLUMNS).T
        transfers = self.transfers
        return SimResult(
            deployment=self.deployment,
            memory=self.memory,
            arrival_ns=columns[0],
            first_token_ns=columns[1],
            finish_ns=columns[2],
            input_tokens=columns[3],
            output_tokens=columns[4],
            cached_tokens=columns[5],
            scheduled_ns=columns[6],
            request_id=columns[7],
            pools=self._pool_runs(),
            submitted=self.submitted,
            rejected=self.rejected,
            unfinished=self.submitted - len(columns[0]) - self.rejected - self.failed,
            failed=self.failed,
            failures=len(self.options.failures),
            measured_from_ns=warmup_ns,
            measured_to_ns=int(self.env.now_ns),
            drained=self.options.drain,
            transfers=transfers.count if transfers else 0,
            transfer_wait_ns=transfers.wait_ns if transfers else 0,
            transfer_ns=transfers.transfer_ns if transfers else 0,
        )

    def _pool_runs(self) -> list[PoolRun]:
        runs = []
        for pool in self.deployment.pools:
            mine = [i for i in self._instances() if i.pool is pool]
            causes = dict.fromkeys(c for i in mine for c in i.time.ns)
            gpu_ns = {c: sum(i.time.ns.get(c, 0.0) for i in mine) for c in causes}
            idle = sum(gpu_ns.get(c, 0.0) for c in ("idle", "transfer_wait", "kv_full", "failed"))
            total = sum(gpu_ns.values())
            runs.append(
                PoolRun(
                    pool=pool,
                    gpu_ns=gpu_ns,
                    busy_share=1 - idle / total if total else 0.0,
                    token_gaps=[i.token_gaps for i in mine],
                    most_admitted_in_a_step=max(i.ranks.most_admitted for i in mine),
                    preemptions=sum(i.ranks.preemptions for i in mine),
                )
            )
        return runs
