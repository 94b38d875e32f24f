"""vLLM's CPU platform with expert-parallel collectives and EPLB; chosen by the plug-in's `cpu_platform_class`.

vLLM asks its platform for the communicator and the worker, so both are exchanged here without touching vLLM's own.
"""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class RackplanCpuPlatform(CpuPlatform):
    """The CPU platform; only the communicator and the default worker differ."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Qualified name of the communicator: vLLM's has no variable-length collectives, which DP + EP needs."""
        return "rackplan.engine.vllm_plugin.cpu_communicator.RackplanCpuCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's own, with this plug-in's worker where the user named none."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "rackplan.engine.vllm_plugin.cpu_worker.RackplanCpuWorker"
        super().check_and_update_config(vllm_config)
