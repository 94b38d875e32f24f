"""The options of the commands: names, notation, help. Those that several commands share are stated once."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rackplan.cli import options
from rackplan.engine import GPUS, MODELS
from rackplan.engine.deployment import MOST_GPUS


def _whole(name: str, least: int, metavar: str, about: str, most: int = 10**12 - 1) -> Any:
    return typer.Option(name, parser=options.parse_int(name, least, most), metavar=metavar, help=about)


def _above_zero(name: str, example: str, metavar: str, about: str, most: float = 1e9) -> Any:
    return typer.Option(name, parser=options.parse_above_zero(name, example, most), metavar=metavar, help=about)


def _time(name: str, about: str) -> Any:
    return typer.Option(name, parser=lambda text: options.parse_duration(text, name), metavar="TIME", help=about)


TargetTps = Annotated[
    float, typer.Option("--target-tps", parser=options.parse_tps, metavar="TPS", help="900k, 1.2M or 954000 tok/s.")
]
Count = Annotated[
    str, typer.Option("--count", metavar="total|output", help="What counts; total = cached + new input + output.")
]
Per = Annotated[str, typer.Option("--per", metavar="gpu|deployment", help="What --target-tps is over.")]
Model = Annotated[str, typer.Option("--model", metavar="MODEL", help="|".join(MODELS) + ", or a model's folder.")]
Gpu = Annotated[str, typer.Option("--gpu", metavar="GPU", help="|".join(GPUS))]
Gpus = Annotated[int, _whole("--gpus", 1, "N", "At most this many GPUs.", MOST_GPUS)]
P90Interactivity = Annotated[
    float, _above_zero("--p90-interactivity", "150", "TOK_S_USER", "SLO: what 90 % of requests reach, 1000 / TPOT ms.")
]
P90Ttft = Annotated[float, _time("--p90-ttft", "SLO: time to first token of 90 % of requests.")]
Trials = Annotated[int, _whole("--trials", 1, "N", "Configurations to simulate in the search.", 100_000)]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where plan.json, deployment.yaml and report.html go.")]

DeploymentFile = Annotated[Path, typer.Argument(metavar="DEPLOYMENT.yaml", help="The deployment.")]
Cv = Annotated[
    float | None, _above_zero("--cv", "3", "CV", "Burstiness of --rate arrivals: 1 is Poisson (default), 3 bursty.", 20)
]

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json or a deployment's YAML.")]
Changes = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="As in decode.dep=16; repeatable.")]
RunSettings = Annotated[
    list[str],
    typer.Option("--run", metavar="KEY=VALUE", help="cold_start=true, eplb_off_s=600 or drift_per_step=1.0e-5."),
]
Fail = Annotated[
    list[str],
    typer.Option(
        "--fail",
        metavar="ROLE:N@AT[+DOWN]",
        help="Instance N is lost at a time, and back DOWN later (default 160s, a start-up on H200); repeatable.",
    ),
]
NoResubmit = Annotated[
    bool, typer.Option("--no-resubmit", help="With --fail: lost requests without a token fail, as behind our router.")
]
WhatifWorkload = Annotated[
    str | None, typer.Option("--workload", metavar="WORKLOAD", help="Default: the plan's; agentx for a YAML.")
]

Workload = Annotated[
    str, typer.Option("--workload", metavar="WORKLOAD", help="agentx, fixed:ISL/OSL, or a trace FILE.")
]
Concurrency = Annotated[
    int | None, _whole("--concurrency", 1, "N", "Closed loop: requests (or agentic sessions) in flight.", 200_000)
]
Rate = Annotated[float | None, _above_zero("--rate", "12.5", "REQ_S", "Open loop: requests per second.")]
Duration = Annotated[float, _time("--duration", "Simulated time.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        parser=options.parse_name("--calibration", "h200-v2-lite or the path of a file"),
        metavar="NAME",
        help="Default: the one of this model and GPU.",
    ),
]
Replications = Annotated[
    int, _whole("--replications", 1, "N", "Independent runs behind the 95 % intervals; one takes batch means.", 1000)
]
Seed = Annotated[int, _whole("--seed", 0, "N", "The same seed gives the same answer to the byte.")]
Thinking = Annotated[
    str | None, typer.Option("--thinking", metavar="on|off", help="Which measured acceptance of drafts. Default: on.")
]
AcceptanceSpread = Annotated[
    float | None,
    _above_zero(
        "--acceptance-spread", "0.05", "SD", "Of a draft's acceptance probability, over requests. Default: 0.", 0.4
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]

CalibrationName = Annotated[str, typer.Argument(metavar="NAME", help="As `rackplan calibration list` prints it.")]
StepPool = Annotated[str, typer.Option("--pool", metavar="prefill|decode", help="Which pool's step.")]
Dep = Annotated[int, _whole("--dep", 1, "N", "Data-parallel ranks of the instance.")]
Batch = Annotated[int, _whole("--batch", 1, "N", "Requests per rank.")]
Context = Annotated[int, _whole("--context", 0, "N", "Tokens in the KV cache of each request.")]
Drafts = Annotated[int, _whole("--drafts", 0, "K", "Draft tokens per request.")]
Against = Annotated[
    list[Path] | None,
    typer.Option("--against", metavar="FILE", help="A client's result, or a profile folder; repeatable."),
]
Served = Annotated[
    Path | None, typer.Option("--deployment", metavar="DEPLOYMENT.yaml", help="What the --against runs ran on.")
]
ProfileFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A profile, as `rackplan profile` writes it.")]
NewName = Annotated[
    str, typer.Option("--name", parser=options.parse_name("--name", "h200-mine"), metavar="NAME", help="Its name.")
]
Metrics = Annotated[
    list[str],
    typer.Option("--metrics", metavar="URL|FILE", help="An engine's /metrics, or two files of it, the earlier first."),
]
Over = Annotated[float, _time("--over", "Time between the two scrapes.")]
LiveDeployment = Annotated[Path, typer.Option("--deployment", metavar="DEPLOYMENT.yaml", help="What the engine runs.")]
Before = Annotated[str, typer.Argument(metavar="A", help="The calibration before; a name or a file.")]
After = Annotated[str, typer.Argument(metavar="B", help="The one after, of the same model and GPU.")]
TableGpu = Annotated[str, typer.Argument(metavar="GPU", help="A GPU that the tables of aiconfigurator-core have.")]
OutPage = Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="Plot and tables as one page.")]
OutFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the calibration goes (JSON).")]
New = Annotated[int | None, _whole("--new", 1, "N", "New prompt tokens of a chunk (prefill; 8192 unless given).")]

TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}

Target = Annotated[str, typer.Option("--target", metavar="TARGET", help="local, shell, lws, dynamo or llm-d.")]
ServedModel = Annotated[
    str | None, typer.Option("--model", metavar="PATH", help="What vLLM loads. Default: the model's checkpoint.")
]
Python = Annotated[str, typer.Option("--python", metavar="PATH", help="The interpreter that vLLM is installed for.")]
LocalPython = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="local: the interpreter that has vLLM. Default: this one."),
]
Host = Annotated[
    str | None, typer.Option("--host", metavar="ADDRESS", help="local: what servers bind to; 127.0.0.1 unless given.")
]
Port = Annotated[int, _whole("--port", 1, "PORT", "Where the deployment answers.", 65_000)]
EntryPort = Annotated[
    int | None, _whole("--port", 1, "PORT", "local, shell: where the deployment answers; 8000 unless given.", 65_000)
]
StateDir = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Where deployments of this machine are kept track of.")
]
StartTimeout = Annotated[float, _time("--start-timeout", "How long servers may take to be healthy.")]
CanaryWorkload = Annotated[
    str | None, typer.Option("--workload", metavar="fixed:ISL/OSL", help="local: of the canary. Default: the plan's.")
]
Requests = Annotated[
    int | None, _whole("--requests", 1, "N", "local: requests of the canary; 100 unless given.", 100_000)
]
Tolerance = Annotated[
    float | None,
    _above_zero("--tolerance", "25", "PCT", "local: roll back where worse than predicted by more; 25 unless given."),
]
NoCanary = Annotated[
    bool, typer.Option("--no-canary", help="local: keep it once it is healthy and runs what was planned.")
]
DeployTimeout = Annotated[
    float | None,
    typer.Option(
        "--start-timeout",
        parser=lambda text: options.parse_duration(text, "--start-timeout"),
        metavar="TIME",
        help="local: how long servers may take to be healthy; 600s unless given.",
    ),
]
ProfileDir = Annotated[Path, typer.Option("--out", metavar="DIR", help="The profile's folder; a cut one goes on.")]
Budget = Annotated[float, _time("--budget", "Wall time that the profile may take.")]
ProfiledModel = Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or a known name.")]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", metavar="PATH", help="What vLLM loads. Default: the model's own.")
]
ProfiledGpus = Annotated[int, _whole("--gpus", 1, "N", "GPUs of this machine to use.", 64)]
InputTokens = Annotated[int, _whole("--input-tokens", 1, "N", "Prompt tokens of the served loads.")]
OutputTokens = Annotated[int, _whole("--output-tokens", 2, "N", "Output tokens of the served loads.")]
Repeats = Annotated[
    int, _whole("--repeats", 1, "N", "How often each rate is served, in turns: tells a machine's drift from load.", 50)
]
MaxModelLen = Annotated[
    int | None, _whole("--max-model-len", 64, "N", "Longest request, tokens; 16384 or what the model takes.")
]
MaxSeqs = Annotated[int, _whole("--max-num-seqs", 1, "N", "Requests of a rank.")]
MaxBatched = Annotated[int, _whole("--max-num-batched-tokens", 64, "N", "Tokens of a step of a rank.")]
Utilization = Annotated[
    float, _above_zero("--gpu-memory-utilization", "0.9", "SHARE", "Of a GPU's memory, vLLM's share.", 1.0)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")]
EngineGpu = Annotated[str, typer.Option("--gpu", metavar="GPU", help="|".join(GPUS))]

FilesDir = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the files of another target go.")]
EngineRelease = Annotated[
    str | None, typer.Option("--engine", metavar="RELEASE", help="vLLM's, 0.33 or 0.32. Default: 0.33; 0.32 on cpu.")
]
StepLogs = Annotated[str | None, typer.Option("--log-dir", metavar="DIR", help="Servers log their steps there.")]
Hosts = Annotated[
    str | None, typer.Option("--hosts", metavar="A,B", help="shell: the machines, in order. Default: this one.")
]
ClusterName = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the objects. Default: the model.")]
Namespace = Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Default: default.")]
Image = Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="With vLLM. Default: vLLM's own.")]
RouterImage = Annotated[
    str | None, typer.Option("--router-image", metavar="IMAGE", help="lws: with rackplan. Default: rackplan:VERSION.")
]
ModelClaim = Annotated[
    str | None,
    typer.Option("--model-claim", metavar="CLAIM:PATH", help="The volume claim that holds --model, and its mount."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there and differ.")]
