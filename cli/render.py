"""`rackplan render`: a plan as the files that put it on machines."""

import re
from pathlib import Path
from typing import Any

import typer

from rackplan.cli import options, output, params
from rackplan.engine import Deployment, InputError

IMAGES = {"lws": "vllm/vllm-openai:v{release}.0", "llm-d": "vllm/vllm-openai:v{release}.0"}
"""vLLM's own image by target; which Dynamo image has which vLLM is not known here."""
SHELL_ONLY = ("--hosts", "--port")
CLUSTER_ONLY = ("--image", "--router-image", "--model-claim", "--name", "--namespace")


def render(
    plan: params.PlanFile,
    target: params.RenderTarget,
    out: params.RenderOut,
    model: params.ServedModel = None,
    engine: params.EngineRelease = None,
    log_dir: params.StepLogs = None,
    hosts: params.Hosts = None,
    port: params.RenderPort = None,
    name: params.ClusterName = None,
    namespace: params.Namespace = None,
    image: params.Image = None,
    router_image: params.RouterImage = None,
    model_claim: params.ModelClaim = None,
    force: params.Force = False,
) -> None:
    """Write the vLLM commands of a plan: a shell script, or manifests for a cluster."""
    from rackplan.engine.manifests import TARGETS
    from rackplan.engine.parser_table import ENGINE_VERSIONS

    options.one_of("--target", target, TARGETS)
    if engine is not None:
        options.one_of("--engine", engine, ENGINE_VERSIONS)
    given = {
        "--hosts": hosts,
        "--port": port,
        "--image": image,
        "--router-image": router_image,
        "--model-claim": model_claim,
        "--name": name,
        "--namespace": namespace,
    }
    idle = (CLUSTER_ONLY if target == "shell" else SHELL_ONLY) + (("--router-image",) if target != "lws" else ())
    for option in idle:
        if given[option] is not None:
            raise InputError(f"{option} {given[option]}: has no effect with --target {target}; leave it out")
    deployment = options.load_base(plan).deployment
    output.check_folder(out)
    rendering = (
        _shell(deployment, model, engine, log_dir, hosts, port)
        if target == "shell"
        else _cluster(target, deployment, model, engine, log_dir, given)
    )
    for path in rendering.write(out, force=force):
        print(f"Written: {path}")
    print("To apply:", *rendering.commands(out), sep="\n  ")


def _shell(
    deployment: Deployment,
    model: str | None,
    engine: str | None,
    log_dir: str | None,
    hosts: str | None,
    port: int | None,
) -> Any:
    from rackplan.engine.local_servers import FIRST_PORT_ABOVE
    from rackplan.engine.manifests import render_shell
    from rackplan.engine.placement import Placement
    from rackplan.engine.router_config import needs_router

    eager = deployment.gpu_spec.eager
    entry = port or 8000
    placement = Placement(
        device="cpu" if eager else "cuda",
        engine_version=engine or ("0.32" if eager else "0.33"),  # type: ignore[arg-type]
        model=model,
        hosts=tuple(h.strip() for h in hosts.split(",")) if hosts else (),
        first_port=entry + FIRST_PORT_ABOVE if needs_router(deployment) else entry,
        log_dir=log_dir,
    )
    if hosts and not all(re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9.:]*[A-Za-z0-9])?", h) for h in placement.hosts):
        raise InputError(f"--hosts {hosts}: not names of machines; write host-a,host-b")
    return render_shell(deployment, placement, entry)


def _cluster(
    target: str,
    deployment: Deployment,
    model: str | None,
    engine: str | None,
    log_dir: str | None,
    given: dict[str, Any],
) -> Any:
    from rackplan import __version__
    from rackplan.engine.cluster import Cluster
    from rackplan.engine.manifests import render_cluster

    release = engine or "0.33"
    image = given["--image"] or IMAGES.get(target, "").format(release=release)
    if not image:
        raise InputError(f"--image: give Dynamo's image that has vLLM {release}")
    served = model or deployment.model_spec.checkpoint
    if not served:
        raise InputError(f"--model: the checkpoint of {deployment.model} is not known; give a hub name or a path")
    cluster = Cluster(
        name=given["--name"] or re.sub(r"[^a-z0-9]+", "-", Path(deployment.model).name.lower()).strip("-")[:40],
        namespace=given["--namespace"] or "default",
        image=image,
        router_image=given["--router-image"] or f"rackplan:{__version__}",
        model=served,
        model_claim=options.parse_claim(given["--model-claim"]) if given["--model-claim"] else None,
        engine_version=release,  # type: ignore[arg-type]
        log_dir=log_dir,
    )
    return render_cluster(target, deployment, cluster)  # type: ignore[arg-type]


def add_render(app: typer.Typer) -> None:
    """Add `render` to `app`."""
    app.command()(render)
