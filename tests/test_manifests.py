"""A deployment as files: what the servers are told is the same on every target, and the API servers take it."""

import json
import os
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rackplan.cli.main import app, execute
from rackplan.engine import Deployment, InfeasibleError, InputError, parse_deployment
from rackplan.engine.changes import restart_needed
from rackplan.engine.cluster import Cluster
from rackplan.engine.deployment import RouterPolicy
from rackplan.engine.manifest_yaml import to_yaml
from rackplan.engine.manifests import CLUSTER_TARGETS, TARGETS, Rendering, render_cluster, render_shell
from rackplan.engine.placement import Placement
from rackplan.engine.pods import escaped
from rackplan.engine.router import RouterConfig
from rackplan.engine.serving import server_commands

SCHEMAS = yaml.safe_load((Path(__file__).parent / "data" / "crd_schemas.yaml").read_text())
HOSTILE = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`id`",
    "$HOME",
    "$$x $$(y)",
    "a;b&&c|d",
    "new\nline",
    "tab\there",
    "back\\slash",
    "{{ .Values.x }}",
    "# comment",
    "*?[x]",
    "ünïcødé",
    "$LWS_LEADER_ADDRESS",
    "--port 8000",
    "!!python/object",
]


def deployment_of(**changes: Any) -> Deployment:
    """1P1D of DeepSeek-V3 on GB300, decode over four trays; knobs that all targets carry."""
    data: dict[str, Any] = {
        "model": "deepseek-v3",
        "gpu": "gb300",
        "pools": [
            {"role": "prefill", "instances": 2, "dep": 4},
            {"role": "decode", "instances": 1, "dep": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512},
        ],
        "max_model_len": 32768,
        "kv_transfer": {"mode": "pull"},
        "router": {"policy": "least_requests"},
    }
    return parse_deployment({**data, **changes})


def aggregated_of(dep: int = 8, **changes: Any) -> Deployment:
    pools = [{"role": "aggregated", "instances": 1, "dep": dep}]
    base = {"model": "deepseek-v3", "gpu": "gb300", "pools": pools, "router": {"policy": "least_requests"}}
    return parse_deployment({**base, **changes})


def cluster_of(**changes: Any) -> Cluster:
    return Cluster(**{"name": "ds", "image": "vllm:1", "router_image": "rackplan:1", "model": "org/model", **changes})


def objects(rendering: Rendering) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendering.files.get("manifests.yaml", "")))


def expanded(text: str, variables: dict[str, str]) -> str:
    """`text` as Kubernetes leaves it in command, args and env: $$ is $, $(NAME) its value where it has one."""
    out, i = "", 0
    while i < len(text):
        if text[i] != "$" or i + 1 == len(text):
            out, i = out + text[i], i + 1
        elif text[i + 1] == "$":
            out, i = out + "$", i + 2
        elif text[i + 1] == "(" and ")" in text[i:]:
            end = text.index(")", i)
            name = text[i + 2 : end]
            out, i = out + variables.get(name, f"$({name})"), end + 1
        else:
            out, i = out + "$", i + 1
    return out


def containers(rendering: Rendering) -> dict[str, dict[str, Any]]:
    """The vLLM containers by the name of the object and template that they are in."""
    found = {}
    for thing in objects(rendering):
        name = thing["metadata"]["name"]
        if thing["kind"] == "LeaderWorkerSet":
            template = thing["spec"]["leaderWorkerTemplate"]
            for part in ("leaderTemplate", "workerTemplate"):
                if part in template:
                    found[f"{name}/{part}"] = template[part]["spec"]["containers"][0]
        if thing["kind"] == "DynamoGraphDeployment":
            for service, spec in thing["spec"]["services"].items():
                if service != "Frontend":
                    found[service] = spec["extraPodSpec"]["mainContainer"]
    if "modelservice.values.yaml" in rendering.files:
        values = yaml.safe_load(rendering.files["modelservice.values.yaml"])
        found |= {r: values[r]["containers"][0] for r in ("prefill", "decode") if values[r]["create"]}
    return found


def run_as_pod(container: dict[str, Any], folder: Path, **variables: str) -> list[str]:
    """What the container's command would be, from a shell that really runs it with a stand-in for the engine."""
    env = {e["name"]: expanded(e["value"], {}) for e in container["env"] if "value" in e}
    for name in ("vllm", "python3"):
        (folder / name).write_text('#!/bin/sh\nfor a in "$@"; do printf "%s\\0" "$a"; done > "$OUT"\n')
        (folder / name).chmod(0o755)
    command = [*container["command"], *(expanded(a, env | variables) for a in container["args"])]
    out = folder / "argv"
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(command, env={**env, **variables, "PATH": path, "OUT": str(out)}, check=True, timeout=20)
    return out.read_bytes().decode().split("\0")[:-1]


# -- the API servers take it --------------------------------------------------------------------------------------


def validate(document: Any, kind: str) -> None:
    checker = Draft202012Validator({**SCHEMAS, "$ref": f"#/$defs/{kind}"})
    problems = [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in checker.iter_errors(document)]
    assert not problems, "\n".join(problems)


VARIANTS = {
    "1p1d": deployment_of(),
    "aggregated": aggregated_of(),
    "aggregated, one tray": aggregated_of(4),
    "two aggregated": aggregated_of(
        pools=[{"role": "aggregated", "instances": 2, "dep": 2}], router={"policy": "least_requests"}
    ),
    "capped, balanced, drafting": deployment_of(
        pools=[
            {"role": "prefill", "instances": 2, "dep": 4, "redundant_experts": 0},
            {"role": "decode", "instances": 2, "dep": 8, "max_new_kv_loads_per_step": 4},
        ],
        eplb={"enabled": True, "redundant_experts": 32},
        speculation={"draft_tokens": 1},
    ),
    "h200": deployment_of(
        model="deepseek-v2-lite",
        gpu="h200",
        pools=[{"role": "prefill", "instances": 1, "dep": 2}, {"role": "decode", "instances": 1, "dep": 4}],
    ),
}


@pytest.mark.parametrize("target", CLUSTER_TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cluster", [{}, {"log_dir": "/logs", "model": "/m/x", "model_claim": ("models", "/m")}])
def test_every_object_is_one_that_its_schema_takes(target, variant, cluster):
    rendering = render_cluster(target, VARIANTS[variant], cluster_of(**cluster))
    for thing in objects(rendering):
        validate(thing, thing["kind"])
    for name in ("modelservice.values.yaml", "inferencepool.values.yaml"):
        if name in rendering.files:
            validate(yaml.safe_load(rendering.files[name]), name)
    if "inferencepool.values.yaml" in rendering.files:
        extension = yaml.safe_load(rendering.files["inferencepool.values.yaml"])["inferenceExtension"]
        picker = yaml.safe_load(extension["pluginsCustomConfig"][extension["pluginsConfigFile"]])
        validate(picker, "EndpointPickerConfig")
        known = {p["type"] for p in picker["plugins"]}
        assert {p["pluginRef"] for profile in picker["schedulingProfiles"] for p in profile["plugins"]} <= known


@pytest.mark.parametrize("target", CLUSTER_TARGETS)
def test_what_pods_refer_to_is_rendered_with_them(target):
    rendering = render_cluster(target, VARIANTS["capped, balanced, drafting"], cluster_of())
    text = "".join(rendering.files.values())
    made = {thing["metadata"]["name"] for thing in objects(rendering)}
    for name in re.findall(r"configMap:\s+name: (\S+)", text):
        assert name in made
    domains = [t for t in objects(rendering) if t["kind"] == "ComputeDomain"]
    (domain,) = domains
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    claimed = set(re.findall(r"resourceClaimTemplateName: (\S+)", text))
    assert claimed == {template}


def test_an_unknown_field_is_an_error_of_the_schema():
    (thing, *_) = [t for t in objects(render_cluster("lws", deployment_of(), cluster_of())) if t["kind"] == "Service"]
    thing["spec"]["selecter"] = {}
    with pytest.raises(AssertionError, match="selecter"):
        validate(thing, "Service")


# -- the same command everywhere ----------------------------------------------------------------------------------


def options_of(argv: list[str]) -> dict[str, str | None]:
    """Option -> value, None for a switch."""
    words = [*argv, "--"]
    return {a: None if b.startswith("--") else b for a, b in pairwise(words) if a.startswith("--")}


OF_THE_PLACE = {"--host", "--port", "--data-parallel-address", "--data-parallel-rpc-port", "--data-parallel-size-local"}
OF_THE_TARGET = {"--model", "--disaggregation-mode", "--scheduler-cls"}


@pytest.mark.parametrize("target", CLUSTER_TARGETS)
@pytest.mark.parametrize("variant", ["1p1d", "capped, balanced, drafting"])
def test_pods_are_told_what_local_servers_are_told(target, variant, tmp_path):
    deployment = VARIANTS[variant]
    placement = Placement(model="org/model", hosts=tuple(f"h{i}" for i in range(8)))
    local = {c.role: c for c in server_commands(deployment, placement) if c.node == 0}
    pods = containers(render_cluster(target, deployment, cluster_of()))
    for role, command in local.items():
        (name,) = [n for n in pods if role in n and "/workerTemplate" not in n or n == f"ds-{role}/workerTemplate" and
                   f"ds-{role}/leaderTemplate" not in pods]  # fmt: skip
        argv = run_as_pod(pods[name], tmp_path, LWS_LEADER_ADDRESS="leader", LWS_WORKER_INDEX="0")
        of_place = OF_THE_PLACE | OF_THE_TARGET
        told = {k: v for k, v in options_of(argv).items() if k not in of_place and k != "-m"}
        assert told == {k: v for k, v in options_of(list(command.argv[3:])).items() if k not in of_place}
        assert "org/model" in argv


def test_followers_of_an_instance_know_their_leader_and_first_rank(tmp_path):
    pods = containers(render_cluster("lws", deployment_of(), cluster_of()))
    leader = "ds-decode-0.ds-decode"
    for index in ("1", "3"):
        worker = pods["ds-decode/workerTemplate"]
        told = options_of(run_as_pod(worker, tmp_path, LWS_LEADER_ADDRESS=leader, LWS_WORKER_INDEX=index))
        assert told["--data-parallel-start-rank"] == str(int(index) * 4)
        assert told["--data-parallel-address"] == leader
        assert "--headless" in told
        assert "--port" not in told
        assert "readinessProbe" not in worker


def test_llmd_followers_run_the_other_branch(tmp_path):
    decode = containers(render_cluster("llm-d", deployment_of(), cluster_of()))["decode"]
    first = options_of(run_as_pod(decode, tmp_path, LWS_LEADER_ADDRESS="a", LWS_WORKER_INDEX="0"))
    second = options_of(run_as_pod(decode, tmp_path, LWS_LEADER_ADDRESS="a", LWS_WORKER_INDEX="2"))
    assert (first["--port"], "--headless" in first) == ("8200", False)
    assert (second["--data-parallel-start-rank"], "--headless" in second) == ("8", True)


def test_dynamo_states_nothing_that_its_operator_adds(tmp_path):
    pods = containers(render_cluster("dynamo", deployment_of(), cluster_of()))
    argv = run_as_pod(pods["decode"], tmp_path)
    told = options_of(argv)
    assert argv[:2] == ["-m", "dynamo.vllm"]
    assert told["--disaggregation-mode"] == "decode"
    assert told["--data-parallel-size"] == "16"
    assert not {"--data-parallel-address", "--data-parallel-size-local", "--headless", "--port", "--host"} & set(told)


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("target", CLUSTER_TARGETS)
def test_a_hostile_model_name_reaches_the_engine_as_it_is(target, hostile, tmp_path):
    model = f"m/{hostile}"
    pods = containers(render_cluster(target, deployment_of(), cluster_of(model=model)))
    for container in pods.values():
        argv = run_as_pod(container, tmp_path, LWS_LEADER_ADDRESS="leader", LWS_WORKER_INDEX="1", x="wrong", y="wrong")
        assert model in argv
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_log_folder_reaches_the_pod_as_it_is(hostile):
    pods = containers(render_cluster("lws", deployment_of(), cluster_of(log_dir=f"/logs/{hostile}")))
    for container in pods.values():
        env = {e["name"]: e.get("value") for e in container["env"]}
        assert expanded(env["RACKPLAN_STEP_LOG_DIR"], {"y": "wrong"}) == f"/logs/{hostile}"


@given(st.text(alphabet="$()ab ", max_size=12))
def test_kubernetes_leaves_escaped_text_as_it_was(text):
    assert expanded(escaped(text), {"a": "wrong", "b": "wrong", "": "wrong", "ab": "wrong"}) == text


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=3))
def test_yaml_says_what_the_objects_say(documents):
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


# -- racks --------------------------------------------------------------------------------------------------------


def pod_specs(rendering: Rendering) -> list[dict[str, Any]]:
    """What schedules each vLLM pod, wherever the target says it."""
    found = []
    for thing in objects(rendering):
        if thing["kind"] == "LeaderWorkerSet":
            template = thing["spec"]["leaderWorkerTemplate"]
            found += [template[t]["spec"] for t in ("leaderTemplate", "workerTemplate") if t in template]
        if thing["kind"] == "DynamoGraphDeployment":
            services = thing["spec"]["services"].items()
            found += [s["extraPodSpec"] for n, s in services if n != "Frontend"]
    if "modelservice.values.yaml" in rendering.files:
        values = yaml.safe_load(rendering.files["modelservice.values.yaml"])
        found += [values[r] | values[r]["extraConfig"] for r in ("prefill", "decode") if values[r]["create"]]
    return found


@pytest.mark.parametrize("target", CLUSTER_TARGETS)
@pytest.mark.parametrize(("gpu", "product"), [("gb300", "NVIDIA-GB300"), ("gb200", "NVIDIA-GB200")])
def test_pods_run_on_nodes_of_the_planned_gpu_in_one_nvlink_domain(target, gpu, product):
    specs = pod_specs(render_cluster(target, deployment_of(gpu=gpu), cluster_of()))
    assert len(specs) >= 2
    for spec in specs:
        assert spec["nodeSelector"]["nvidia.com/gpu.product"] == product
        (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "nvidia.com/gpu.clique"
        assert term["labelSelector"]["matchLabels"] == {"rackplan/deployment": "ds"}
        assert spec["resourceClaims"][0]["resourceClaimTemplateName"] == "ds-imex-channel"


def test_pods_have_the_label_that_their_affinity_looks_for():
    rendering = render_cluster("llm-d", deployment_of(), cluster_of())
    labels = yaml.safe_load(rendering.files["modelservice.values.yaml"])["modelArtifacts"]["labels"]
    assert labels["rackplan/deployment"] == "ds"
    for thing in objects(render_cluster("lws", deployment_of(), cluster_of())):
        if thing["kind"] == "LeaderWorkerSet":
            template = thing["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            assert template["metadata"]["labels"]["rackplan/deployment"] == "ds"
    made = objects(render_cluster("dynamo", deployment_of(), cluster_of()))
    (graph,) = [t for t in made if t["kind"] == "DynamoGraphDeployment"]
    assert graph["spec"]["services"]["decode"]["extraPodMetadata"]["labels"]["rackplan/deployment"] == "ds"


def gpus_asked_for(rendering: Rendering) -> int:
    total = 0
    for thing in objects(rendering):
        if thing["kind"] == "LeaderWorkerSet":
            spec = thing["spec"]
            pod = spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
            gpus = int(pod["resources"]["limits"]["nvidia.com/gpu"])
            total += spec["replicas"] * spec["leaderWorkerTemplate"]["size"] * gpus
        if thing["kind"] == "DynamoGraphDeployment":
            for name, service in thing["spec"]["services"].items():
                if name != "Frontend":
                    nodes = service.get("multinode", {}).get("nodeCount", 1)
                    total += service["replicas"] * nodes * int(service["resources"]["limits"]["gpu"])
    if "modelservice.values.yaml" in rendering.files:
        values = yaml.safe_load(rendering.files["modelservice.values.yaml"])
        for role in ("prefill", "decode"):
            if values[role]["create"]:
                gpus = int(values[role]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
                total += values[role]["replicas"] * values[role]["parallelism"]["workers"] * gpus
    return total


@pytest.mark.parametrize("target", CLUSTER_TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_ask_for_as_many_gpus_as_the_plan_counts(target, variant):
    assert gpus_asked_for(render_cluster(target, VARIANTS[variant], cluster_of())) == VARIANTS[variant].gpus


def test_no_pod_asks_for_more_than_a_tray():
    for spec in pod_specs(render_cluster("lws", deployment_of(), cluster_of())):
        assert int(spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) <= 4


def test_a_pod_that_leaves_gpus_of_its_tray_to_others_claims_no_channel():
    rendering = render_cluster("lws", VARIANTS["two aggregated"], cluster_of())
    assert not [t for t in objects(rendering) if t["kind"] == "ComputeDomain"]
    assert all("resourceClaims" not in spec for spec in pod_specs(rendering))


def test_past_one_nvlink_domain_each_instance_keeps_to_one():
    pools = [{"role": "prefill", "instances": 16, "dep": 4}, {"role": "decode", "instances": 2, "dep": 16}]
    deployment = deployment_of(pools=pools)
    for spec in pod_specs(render_cluster("lws", deployment, cluster_of())):
        (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-key"]
    for target in ("dynamo", "llm-d"):
        with pytest.raises(InputError, match="more than one NVLink domain of 72.*--target lws"):
            render_cluster(target, deployment, cluster_of())


def test_h200_needs_neither_domain_nor_channel():
    rendering = render_cluster("lws", VARIANTS["h200"], cluster_of())
    assert not [t for t in objects(rendering) if t["kind"] == "ComputeDomain"]
    for spec in pod_specs(rendering):
        assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
        assert "affinity" not in spec


# -- routers ------------------------------------------------------------------------------------------------------


def test_the_router_knows_every_instance_and_the_policy():
    rendering = render_cluster("lws", deployment_of(router={"policy": "prefix_affinity"}), cluster_of(namespace="llm"))
    (config,) = [t for t in objects(rendering) if t["metadata"]["name"] == "ds-router" and t["kind"] == "ConfigMap"]
    router = RouterConfig.model_validate_json(config["data"]["router.json"])
    assert router.policy == "prefix_affinity"
    assert [i.url for i in router.entry] == [f"http://ds-prefill-{i}.ds-prefill.llm.svc:8000" for i in (0, 1)]
    assert [(i.url, i.ranks) for i in router.decode] == [("http://ds-decode-0.ds-decode.llm.svc:8000", 16)]


def test_one_instance_that_balances_itself_needs_no_router():
    rendering = render_cluster("lws", VARIANTS["aggregated"], cluster_of())
    assert not [t for t in objects(rendering) if t["kind"] == "Deployment"]
    (service,) = [t for t in objects(rendering) if t["kind"] == "Service"]
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


CARRIED = {
    "dynamo": dict.fromkeys(get_args(RouterPolicy), False) | {"least_requests": True, "prefix_affinity": True},
    "llm-d": dict.fromkeys(get_args(RouterPolicy), False) | {"least_requests": True},
    "lws": dict.fromkeys(get_args(RouterPolicy), True),
}


@pytest.mark.parametrize(("target", "policy"), [(t, p) for t, ps in CARRIED.items() for p in ps])
def test_a_target_refuses_a_policy_that_it_does_not_carry(target, policy):
    deployment = deployment_of(router={"policy": policy})  # requests enter instances of four ranks
    if CARRIED[target][policy]:
        assert render_cluster(target, deployment, cluster_of()).files
    else:
        with pytest.raises(InputError, match=f"--target {target} does not carry router.policy={policy}.*; set "):
            render_cluster(target, deployment, cluster_of())


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
def test_pushing_is_refused_where_the_targets_router_only_pulls(target):
    with pytest.raises(InputError, match=f"--target {target} does not carry kv_transfer.mode=push; set pull"):
        render_cluster(target, deployment_of(kv_transfer={"mode": "push"}), cluster_of())


# -- files --------------------------------------------------------------------------------------------------------


def test_the_rendering_holds_the_deployment_it_is_of():
    for target in CLUSTER_TARGETS:
        text = render_cluster(target, deployment_of(), cluster_of()).files["deployment.yaml"]
        assert parse_deployment(yaml.safe_load(text)) == deployment_of()


def test_the_revision_is_that_of_what_is_applied():
    one, same, other = cluster_of(), cluster_of(), cluster_of(image="vllm:2")
    assert one.revision(deployment_of()) == same.revision(deployment_of())
    assert one.revision(deployment_of()) != other.revision(deployment_of())
    assert one.revision(deployment_of()) != one.revision(deployment_of(max_model_len=4096))
    for container in containers(render_cluster("lws", deployment_of(), one)).values():
        assert {"name": "RACKPLAN_REVISION", "value": one.revision(deployment_of())} in container["env"]


def test_files_that_differ_are_kept_unless_forced(tmp_path):
    rendering = render_cluster("lws", deployment_of(), cluster_of())
    rendering.write(tmp_path)
    rendering.write(tmp_path)  # the same again is no loss
    (tmp_path / "manifests.yaml").write_text("mine")
    with pytest.raises(InputError, match="manifests.yaml: is there and differs"):
        rendering.write(tmp_path)
    assert (tmp_path / "manifests.yaml").read_text() == "mine"
    rendering.write(tmp_path, force=True)
    assert (tmp_path / "manifests.yaml").read_text() == rendering.files["manifests.yaml"]


def test_a_deployment_that_does_not_fit_is_not_rendered():
    too_long = aggregated_of(
        pools=[{"role": "aggregated", "instances": 1, "dep": 4, "gpu_memory_utilization": 0.2}], max_model_len=163840
    )
    with pytest.raises(InfeasibleError, match="short"):
        render_cluster("lws", too_long, cluster_of())
    with pytest.raises(InfeasibleError, match="short"):
        render_shell(too_long, Placement(model="m"), 8000)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "Not_A_Name"}, "--name Not_A_Name"),
        ({"namespace": ""}, "--namespace"),
        ({"model": "/data/x"}, "--model /data/x: a path in the pods"),
        ({"model": "/data/x", "model_claim": ("c", "/other")}, "not under --model-claim's /other"),
    ],
)
def test_a_cluster_that_could_not_be_is_refused(changes, problem):
    with pytest.raises(InputError, match=problem):
        cluster_of(**changes)


def test_a_gpu_that_is_in_no_cluster_is_refused():
    deployment = parse_deployment(
        {"model": "deepseek-v2-lite", "gpu": "cpu", "pools": [{"role": "aggregated", "instances": 1, "dep": 8}]}
    )
    with pytest.raises((InputError, InfeasibleError), match="cpu"):
        render_cluster("lws", deployment, cluster_of())


def test_two_pools_of_one_role_are_two_sets():
    pools = [{"role": "prefill", "instances": 1, "dep": d} for d in (2, 4)]
    deployment = deployment_of(pools=[*pools, {"role": "decode", "instances": 1, "dep": 8}])
    made = objects(render_cluster("lws", deployment, cluster_of()))
    sets = [t["metadata"]["name"] for t in made if t["kind"] == "LeaderWorkerSet"]
    assert sets == ["ds-prefill", "ds-prefill-1", "ds-decode"]
    with pytest.raises(InputError, match="two pools of one role"):
        render_cluster("llm-d", deployment, cluster_of())


# -- the shell script ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_script_starts_exactly_the_servers_commands(hostile, tmp_path):
    deployment = deployment_of(
        model="deepseek-v2-lite",
        gpu="h200",
        pools=[{"role": "prefill", "instances": 1, "dep": 1}, {"role": "decode", "instances": 1, "dep": 2}],
    )
    placement = Placement(model=f"m/{hostile}", log_dir=f"/logs/{hostile}")
    out, tools = tmp_path / "my files", tmp_path / "bin"
    render_shell(deployment, placement, 8000).write(out)
    tools.mkdir()
    for name in ("vllm", "python3"):
        tool = tools / name
        tool.write_text(
            '#!/bin/sh\nfor a in "$0" "$@"; do printf "%s\\0" "$a"; done > "$OUT/$$.argv"\n'
            'printf "%s" "$RACKPLAN_STEP_LOG_DIR" > "$OUT/$$.log"\nsleep 1\n'
        )
        tool.chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    subprocess.run(["bash", str(out / "serve.sh")], env=env, check=True, timeout=30, stdout=subprocess.DEVNULL)
    started = {tuple(f.read_bytes().decode().split("\0")[1:-1]) for f in tmp_path.glob("*.argv")}
    wanted = {c.argv[1:] for c in server_commands(deployment, placement)}
    assert started == wanted | {("-m", "rackplan.engine.router", "router.json")}
    assert {f.read_text() for f in tmp_path.glob("*.log")} == {f"/logs/{hostile}", ""}
    assert not list(tmp_path.rglob("pwned"))


def test_the_script_has_each_machines_servers_and_refuses_another_machine(tmp_path):
    placement = Placement(model="m", hosts=tuple(f"h{i}" for i in range(6)))
    rendering = render_shell(deployment_of(), placement, 8000)
    assert rendering.commands(Path("o ut")) == [f"bash 'o ut'/serve.sh {m}  # on h{m}" for m in range(6)]
    rendering.write(tmp_path)
    done = subprocess.run(["bash", str(tmp_path / "serve.sh"), "6"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "machine 6: unknown; 0 to 5" in done.stderr
    router = RouterConfig.model_validate_json(rendering.files["router.json"])
    assert [i.url for i in router.decode] == ["http://h2:8102"]


def test_when_one_server_ends_the_script_ends_the_others(tmp_path):
    deployment = deployment_of(
        model="deepseek-v2-lite",
        gpu="h200",
        pools=[{"role": "prefill", "instances": 1, "dep": 1}, {"role": "decode", "instances": 1, "dep": 1}],
    )
    render_shell(deployment, Placement(model="m"), 8000).write(tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "vllm").write_text('#!/bin/sh\ncase "$*" in *producer*) sleep 0.3; exit 1;; esac\nexec sleep 60\n')
    (tools / "python3").write_text("#!/bin/sh\nexec sleep 60\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(tmp_path / "serve.sh")], env=env, timeout=20, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    for pid in re.findall(r"process (\d+)", done.stdout):
        assert not Path(f"/proc/{pid}").exists()


# -- what a change restarts ---------------------------------------------------------------------------------------


def test_equal_deployments_need_no_restart():
    assert restart_needed(deployment_of(), deployment_of()) == []


def with_pool(role: str, **changes: Any) -> Deployment:
    data = deployment_of().to_dict()
    for pool in data["pools"]:
        if pool["role"] == role:
            pool |= changes
    return parse_deployment(data)


@pytest.mark.parametrize(
    ("new", "restarts"),
    [
        (with_pool("decode", max_num_seqs=64), {"decode.max_num_seqs": ("decode", "router")}),
        (with_pool("decode", gpu_memory_utilization=0.9), {"decode.gpu_memory_utilization": ("decode",)}),
        (with_pool("prefill", instances=3), {"prefill.instances": ("router",)}),
        (with_pool("prefill", offload={"group_size": 4}), {"prefill.offload.group_size": ("prefill",)}),
        (deployment_of(router={"policy": "round_robin"}), {"router.policy": ("router",)}),
        (deployment_of(max_model_len=4096), {"max_model_len": ("prefill", "decode")}),
        (deployment_of(kv_transfer={"mode": "push"}), {"kv_transfer.mode": ("prefill", "decode")}),
        (aggregated_of(), {"pools": ("aggregated", "router")}),
    ],
)
def test_a_change_names_what_must_restart(new, restarts):
    found = {c.knob: c.restarts for c in restart_needed(deployment_of(), new)}
    assert restarts.items() <= found.items()


@pytest.mark.parametrize(
    "new",
    [
        with_pool("decode", max_num_seqs=64, enable_prefix_caching=False),
        with_pool("prefill", dep=8),
        with_pool("prefill", max_num_batched_tokens=4096),
        deployment_of(max_model_len=4096, speculation={"draft_tokens": 1}),
        deployment_of(eplb={"enabled": True, "redundant_experts": 32}),
        deployment_of(kv_transfer={"mode": "push"}, router={"policy": "round_robin"}),
    ],
)
def test_a_pool_restarts_exactly_where_its_command_changes(new):
    def told(deployment: Deployment) -> dict[str, str]:
        pods = containers(render_cluster("lws", deployment, cluster_of()))
        return {role: "".join(c["args"][0] for n, c in pods.items() if role in n) for role in ("prefill", "decode")}

    before, after = told(deployment_of()), told(new)
    restarted = {r for c in restart_needed(deployment_of(), new) for r in c.restarts} - {"router"}
    assert restarted == {role for role in before if before[role] != after[role]}


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"deployment": deployment_of().to_dict(), "load": {}, "inputs": {}, "provenance": {}}))
    return path


@pytest.mark.parametrize("target", TARGETS)
def test_deploy_writes_the_files_and_says_how_to_apply_them(target, plan_file, tmp_path, capsys):
    more = {"shell": ["--hosts", "a,b,c,d,e,f"], "dynamo": ["--image", "dynamo:1"]}.get(target, [])
    args = ["deploy", str(plan_file), "--target", target, "--out", str(tmp_path / "o"), *more]
    assert execute(app, "rackplan", args) == 0
    printed = capsys.readouterr().out.splitlines()
    written = [Path(line.removeprefix("Written: ")) for line in printed if line.startswith("Written: ")]
    assert written
    assert all(path.is_file() for path in written)
    apply = printed[printed.index("To apply:") + 1 :]
    named = {word for line in apply for word in shlex.split(line, comments=True) if word.startswith(str(tmp_path))}
    assert named
    assert all(Path(name).is_file() for name in named)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--target", "slurm"], "--target slurm: unknown; one of local, shell, lws, dynamo, llm-d"),
        (["--target", "shell", "--image", "x"], "--image x: has no effect with --target shell"),
        (["--target", "lws", "--hosts", "a"], "--hosts a: has no effect with --target lws"),
        (["--target", "llm-d", "--router-image", "x"], "--router-image x: has no effect"),
        (["--target", "dynamo"], "--image: give Dynamo's image"),
        (["--target", "lws", "--engine", "0.31"], "--engine 0.31: unknown"),
        (["--target", "lws", "--engine", "0.32"], "dp_sync.algorithm=recursive_doubling (set ring)"),
        (["--target", "lws", "--model-claim", "x"], "--model-claim x: not CLAIM:/PATH"),
        (["--target", "lws", "--model", "/x"], "--model /x: a path in the pods"),
        (["--target", "shell", "--hosts", "a;b"], "--hosts a;b: not names of machines"),
        (["--target", "shell", "--hosts", "a,b,c,d,e,f,g,h"], "the deployment takes 6 of them; remove g,h"),
        (["--target", "shell", "--rate", "3"], "--rate 3.0: has no effect with --target shell"),
        (["--target", "lws", "--no-canary"], "--no-canary: has no effect with --target lws"),
        (["--target", "local"], "--out"),
        (["--target", "shell"], "--hosts 127.0.0.1: 24 GPUs take 6 machines of 4; name them all"),
    ],
)
def test_deploy_refuses_in_one_line(args, problem, plan_file, tmp_path, capsys):
    assert execute(app, "rackplan", ["deploy", str(plan_file), "--out", str(tmp_path / "o"), *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert problem in line
    assert not (tmp_path / "o").exists()


def test_deploy_says_what_the_next_plan_restarts_before_it_replaces_the_files(plan_file, tmp_path, capsys):
    out = tmp_path / "o"
    args = ["deploy", str(plan_file), "--target", "lws", "--out", str(out)]
    assert execute(app, "rackplan", args) == 0
    plan = json.loads(plan_file.read_text())
    decode = next(p for p in plan["deployment"]["pools"] if p["role"] == "decode")
    decode["max_num_seqs"] //= 2
    plan_file.write_text(json.dumps(plan))
    capsys.readouterr()
    assert execute(app, "rackplan", args) == 2
    told = capsys.readouterr().err
    assert "Changes decode.max_num_seqs" in told
    assert "restarts decode" in told
    assert "--force to replace it" in told
    assert execute(app, "rackplan", [*args, "--force"]) == 0
    assert f"max_num_seqs: {decode['max_num_seqs']}" in (out / "deployment.yaml").read_text()


def test_files_of_a_target_need_a_folder(plan_file, capsys):
    assert execute(app, "rackplan", ["deploy", str(plan_file), "--target", "lws"]) == 2
    assert "--out: missing; give the folder" in capsys.readouterr().err


def test_deploy_warns_of_a_plan_that_misses_its_request(plan_file, tmp_path, capsys):
    args = ["deploy", str(plan_file), "--target", "lws", "--out", str(tmp_path / "o")]
    assert execute(app, "rackplan", args) == 0
    assert "Warning" not in capsys.readouterr().err
    plan = json.loads(plan_file.read_text()) | {"feasible": False, "reason": "P90 TTFT 12 s"}
    plan_file.write_text(json.dumps(plan))
    assert execute(app, "rackplan", args) == 0
    assert f"Warning: {plan_file} does not meet what it was asked for: P90 TTFT 12 s" in capsys.readouterr().err
