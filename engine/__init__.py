"""What can be deployed and how vLLM is told: models, GPUs, `Deployment`, memory.

Start with deployment.py. Imports nothing else of rackplan; vLLM and torch only inside the functions that need them.
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
