"""A plan as the files that put it on machines: what `rackplan deploy --target` other than local writes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rackplan.cli import options
from rackplan.engine import Deployment, InputError

if TYPE_CHECKING:
    from rackplan.engine.manifests import Rendering

IMAGES = {"lws": "vllm/vllm-openai:v{release}.0", "llm-d": "vllm/vllm-openai:v{release}.0"}
"""vLLM's own image by target; which Dynamo image has which vLLM is not known here."""


def files_of(
    target: str,
    deployment: Deployment,
    *,
    model: str | None,
    engine: str | None,
    log_dir: str | None,
    hosts: str | None,
    port: int | None,
    cluster: Mapping[str, str | None],
) -> "Rendering":
    """The files of `target`. `cluster`: its options by name, as they were given. Raises InputError, InfeasibleError."""
    from rackplan.engine.parser_table import ENGINE_VERSIONS

    if engine is not None:
        options.one_of("--engine", engine, ENGINE_VERSIONS)
    if target == "shell":
        return _shell(deployment, model, engine, log_dir, hosts, port)
    return _cluster(target, deployment, model, engine, log_dir, cluster)


def _shell(
    deployment: Deployment,
    model: str | None,
    engine: str | None,
    log_dir: str | None,
    hosts: str | None,
    port: int | None,
) -> "Rendering":
    from rackplan.engine.flags import engine_release
    from rackplan.engine.local_servers import FIRST_PORT_ABOVE
    from rackplan.engine.manifests import render_shell
    from rackplan.engine.placement import Placement
    from rackplan.engine.router_config import needs_router

    device = deployment.gpu_spec.device
    entry = port or 8000
    placement = Placement(
        device=device,
        engine_version=engine or engine_release(device),  # type: ignore[arg-type]
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
    given: Mapping[str, str | None],
) -> "Rendering":
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
