"""Takes a profile: exact batches and served loads of one model on this machine, each result kept as it comes.

Whatever a run has done when it is cut stays and is not done again: the same command goes on where the folder stops.
"""

import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rackplan.engine.bench_serve import BenchLoad, run_bench, time_limit_s
from rackplan.engine.deploy_state import Launch
from rackplan.engine.deployment import Deployment
from rackplan.engine.errors import InputError, RackplanError
from rackplan.engine.files import write_all
from rackplan.engine.forward import ForwardRun, time_cases
from rackplan.engine.forward_table import done_cases
from rackplan.engine.local_servers import ROUTER, local_commands, preflight
from rackplan.engine.machine import git_revision, gpu_names, versions, watched_environment
from rackplan.engine.profile import (
    CAPTURED_SHARE,
    FILE,
    LOAD_SHARES,
    Profile,
    ProfileRequest,
    ServedRun,
    Status,
    read_profile,
)
from rackplan.engine.profile_cases import forward_cases
from rackplan.engine.servers import Report, start, stop, wait_healthy

FORWARD_SHARE = 0.5
"""Of the time, for exact batches; serving has the rest."""
START_TIMEOUT_S = 600.0
LOAD_S = 25.0
"""How long arrivals last in a served load."""
LEAST_PROMPTS, MOST_PROMPTS = 24, 600
LEAST_DECODES, WARM_PROMPTS = 4, 8
DECODE_BENCH = ("--kv-transfer-config", '{"kv_connector":"DecodeBenchConnector","kv_role":"kv_both"}')
"""Fills the KV of prompts in place of computing it, so that decode steps follow one another."""
MakeRun = Callable[[], ServedRun]
SERVER_LOGS = ("steps_aggregated-", "steps_prefill-", "steps_decode-")


class Profiler:
    """One profile of a folder."""

    def __init__(self, request: ProfileRequest, folder: Path, report: Report) -> None:
        self.request, self.folder, self.report = request, folder, report
        self.mark = f"profile-{secrets.token_hex(4)}"
        self.deadline_s = time.monotonic() + request.budget_s
        self.file = folder / FILE
        self._logged: dict[str, int] = {}

    def run(self) -> Profile:
        """Do what is not done yet, within the budget. Raises InputError where the folder is another profile's, or
        nothing can run; a load that fails is written down and the next one tried."""
        profile = self._begin()
        try:
            profile = self._forward(profile)
            for name, deployment in self.request.served_deployments().items():
                profile = self._serve(profile, deployment, self._loads(name, deployment))
            one = self.request.aggregated(1)
            profile = self._serve(profile, one, self._decodes(one), DECODE_BENCH)
        finally:
            stop(self.mark)
        return profile

    # -- identity ------------------------------------------------------------------------------------------------
    def _begin(self) -> Profile:
        if self.file.exists():
            profile = read_profile(self.folder)
            for key in ("model", "gpu", "engine_version"):
                if getattr(profile, key) != getattr(self.request, key):
                    raise InputError(
                        f"{self.file}: is of {key}={getattr(profile, key)}, not {getattr(self.request, key)}; "
                        f"give another folder"
                    )
            return profile
        cpu = self.request.device == "cpu"
        profile = Profile(
            model=self.request.model,
            gpu=self.request.gpu,
            engine_version=self.request.engine_version,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            git_revision=git_revision(),
            versions=versions(self.request.python),
            gpus=["cpu"] * self.request.gpus if cpu else gpu_names(),
            environment=watched_environment(),
            time_kind="wall" if cpu else "gpu",
        )
        self._save(profile)
        return profile

    def _save(self, profile: Profile) -> None:
        write_all({self.file: profile.model_dump_json(indent=1) + "\n"})

    # -- exact batches -------------------------------------------------------------------------------------------
    def _forward(self, profile: Profile) -> Profile:
        widths = self.request.ranks()
        until_s = time.monotonic() + FORWARD_SHARE * self.request.budget_s
        for i, ranks in enumerate(widths):
            table = self.folder / f"forward_dep{ranks}.csv"
            share_s = (until_s - time.monotonic()) / (len(widths) - i)
            if share_s <= 0:
                break
            self.report(f"exact batches on {ranks} rank(s), {share_s:.0f} s")
            known = profile.failed_cases.get(table.name, [])
            failed = time_cases(
                self._forward_run(ranks, profile),
                [c for c in forward_cases(self.request.limits(ranks)) if c.name not in known],
                table,
                mark=self.mark,
                deadline_s=time.monotonic() + share_s,
                on_row=self.report,
            )
            if failed:
                failures = {**profile.failed_cases, table.name: known + failed}
                profile = profile.model_copy(update={"failed_cases": failures})
                self._save(profile)
            told = f", failed: {', '.join(failed)}" if failed else ""
            self.report(f"{len(done_cases(table))} batches on {ranks} rank(s){told}")
        return profile

    def _forward_run(self, ranks: int, profile: Profile) -> ForwardRun:
        request = self.request
        return ForwardRun(
            python=request.python,
            model=request.launch(request.aggregated(1)).model,
            gpu=profile.time_kind == "gpu",
            ranks=ranks,
            max_model_len=request.max_model_len,
            max_num_seqs=request.max_num_seqs,
            kv_gib=request.cpu_kv_gib(ranks),
            gpu_memory_utilization=request.gpu_memory_utilization,
        )

    # -- served loads --------------------------------------------------------------------------------------------
    def _serve(
        self, profile: Profile, deployment: Deployment, loads: Mapping[str, MakeRun], argv: tuple[str, ...] = ()
    ) -> Profile:
        """Put the loads that are not done yet on servers of `deployment`. `argv`: more of the servers' commands."""
        done = {r.name for r in profile.runs if r.status == "done"}
        todo = {name: make for name, make in loads.items() if name not in done}
        if not todo or time.monotonic() >= self.deadline_s:
            return profile
        launch = self.request.launch(deployment)
        try:
            preflight(launch, None)
            self._start(launch, argv)
            self._warm(deployment, launch)
            for make in todo.values():
                if time.monotonic() < self.deadline_s:
                    profile = self._load(profile, make(), launch)
        except RackplanError as e:
            self.report(f"{next(iter(todo))} failed: {e}")
            failed = self._run_of(next(iter(todo)), deployment, prompts=1)
            profile = self._with(profile, failed, "failed", str(e))
        finally:
            stop(self.mark)
        return profile

    def _loads(self, name: str, deployment: Deployment) -> dict[str, MakeRun]:
        """A pilot that keeps all seats taken; then arrivals at shares of the rate that it reached, in turns, so that
        what drifts on the machine is told from what a load does. One rank also has a burst, and prompts that fit its
        captured sizes."""
        seats, pilot = self.request.max_num_seqs, f"{name}_pilot"

        def at(share: float, run: str, **length: int) -> ServedRun:
            rate = share * self._rate_of(pilot)
            prompts = min(MOST_PROMPTS, max(LEAST_PROMPTS, round(rate * LOAD_S)))
            return self._run_of(run, deployment, prompts=prompts, rate_req_s=rate, **length)

        def full(run: str, seats: int) -> MakeRun:
            prompts = min(MOST_PROMPTS, max(LEAST_PROMPTS, seats))
            return partial(self._run_of, run, deployment, prompts=prompts, concurrency=seats)

        loads: dict[str, MakeRun] = {pilot: full(pilot, seats)}
        for turn in range(1, self.request.repeats + 1):
            for i, share in enumerate(LOAD_SHARES):
                run = f"{name}_load{i}" + (f"_{turn}" if turn > 1 else "")
                loads[run] = partial(at, share, run)
            if turn == 1 and deployment.gpus == 1:
                loads[f"{name}_burst"] = full(f"{name}_burst", self.request.burst)
                if captured := deployment.pools[0].max_cudagraph_capture_size:
                    short = min(self.request.input_tokens, int(captured * CAPTURED_SHARE))
                    loads[f"{name}_short"] = partial(at, LOAD_SHARES[0], f"{name}_short", input_tokens=short)
        return loads

    def _decodes(self, deployment: Deployment) -> dict[str, MakeRun]:
        """Batches of decoding requests with nothing between their steps."""
        names = {f"decode_{n}": n for n in self.request.decode_batches()}
        return {
            name: partial(
                self._run_of, name, deployment, prompts=max(n, LEAST_DECODES), concurrency=n, decode_only=True
            )
            for name, n in names.items()
        }

    def _start(self, launch: Launch, argv: tuple[str, ...]) -> None:
        for log in self.folder.glob("steps_*.dp*.jsonl"):
            if log.name.startswith(SERVER_LOGS):
                log.unlink()
        self._logged = {}
        servers = [
            start(
                c.name,
                c.argv if c.name == ROUTER else c.argv + argv,
                c.env,
                mark=self.mark,
                url=c.url,
                log_dir=self.folder,
            )
            for c in local_commands(launch, self.mark, self.folder)
        ]
        left_s = self.deadline_s - time.monotonic()
        wait_healthy(servers, min(START_TIMEOUT_S, max(left_s, 1.0)), self.report)

    def _warm(self, deployment: Deployment, launch: Launch) -> None:
        """A few requests before anything is measured: the first compile and allocate."""
        run = self._run_of("warm", deployment, prompts=WARM_PROMPTS, concurrency=WARM_PROMPTS)
        self._bench(run, launch)
        (self.folder / f"serve_{run.name}.json").unlink()
        self._keep_steps(run.name)
        for log in self.folder.glob(f"steps_{run.name}.*"):
            log.unlink()

    def _load(self, profile: Profile, run: ServedRun, launch: Launch) -> Profile:
        profile = self._with(profile, run, "planned")
        try:
            self._bench(run, launch)
        except RackplanError as e:
            self.report(f"{run.name} failed: {e}")
            return self._with(profile, run, "failed", str(e))
        self._keep_steps(run.name)
        return self._with(profile, run, "done")

    def _bench(self, run: ServedRun, launch: Launch) -> None:
        load = BenchLoad(
            name=run.name,
            input_tokens=run.input_tokens,
            output_tokens=run.output_tokens,
            prompts=run.prompts,
            rate_req_s=run.rate_req_s,
            concurrency=run.concurrency,
            seed=sum(run.name.encode()),
        )
        result = run_bench(
            load,
            python=self.request.python,
            url=f"http://{launch.host}:{launch.port}",
            model=launch.model,
            path=self.folder / f"serve_{run.name}.json",
            timeout_s=min(time_limit_s(load), max(1.0, self.deadline_s - time.monotonic())),
        )
        self.report(
            f"{run.name}: {result['request_throughput']:.2f} req/s, TTFT {result['median_ttft_ms']:.0f} ms, "
            f"TPOT {result['median_tpot_ms']:.2f} ms"
        )

    def _rate_of(self, pilot: str) -> float:
        path = self.folder / f"serve_{pilot}.json"
        if not path.exists():
            raise InputError(f"{path}: missing; the rates of the loads follow from it")
        return float(json.loads(path.read_text(encoding="utf-8"))["request_throughput"])

    def _keep_steps(self, name: str) -> None:
        """What the servers' step logs gained in a load, in files of the load's name, the configuration first."""
        for log in sorted(self.folder.glob("steps_*.dp*.jsonl")):
            if not log.name.startswith(SERVER_LOGS):
                continue
            data = log.read_bytes()
            begin = self._logged.get(log.name, 0)
            self._logged[log.name] = len(data)
            config = data[: data.find(b"\n") + 1] if begin else b""
            server = log.name.removeprefix("steps_").removeprefix("aggregated-0.")
            (self.folder / f"steps_{name}.{server}").write_bytes(config + data[begin:])

    def _run_of(self, name: str, deployment: Deployment, **load: Any) -> ServedRun:
        lengths = {"input_tokens": self.request.input_tokens, "output_tokens": self.request.output_tokens}
        return ServedRun(name=name, deployment=deployment.to_dict(), **{**lengths, **load})

    def _with(self, profile: Profile, run: ServedRun, status: Status, reason: str | None = None) -> Profile:
        """The profile with `run` at `status`, saved."""
        changed = run.model_copy(update={"status": status, "reason": reason})
        runs = [r for r in profile.runs if r.name != run.name] + [changed]
        profile = profile.model_copy(update={"runs": runs})
        self._save(profile)
        return profile
