"""What can be deployed, and the engine itself: models, GPUs, `Deployment`, memory; commands and manifests; launching,
verifying, profiling.

Start with deployment.py; serving.py for commands, local.py for launching, profile_run.py for measuring. Imports
nothing else of rackplan; vLLM and torch only inside the functions that need them.
"""

from rackplan.engine.deployment import Deployment, Eplb, Pool, load_deployment, parse_deployment
from rackplan.engine.errors import DeployError, InfeasibleError, InputError, RackplanError
from rackplan.engine.memory import MemoryPlan, check_memory, plan_memory
from rackplan.engine.specs import GPUS, MODELS, GpuSpec, ModelSpec, gpu_spec, model_spec

__all__ = [
    "GPUS",
    "MODELS",
    "DeployError",
    "Deployment",
    "Eplb",
    "GpuSpec",
    "InfeasibleError",
    "InputError",
    "MemoryPlan",
    "ModelSpec",
    "Pool",
    "RackplanError",
    "check_memory",
    "gpu_spec",
    "load_deployment",
    "model_spec",
    "parse_deployment",
    "plan_memory",
]
