"""vLLM's CPU worker with what expert parallelism and EPLB need of it."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rackplan.engine.vllm_plugin import cpu_hooks


class RackplanCpuWorker(CPUWorker):
    """vLLM's worker, with the hooks of cpu_hooks.py where experts are spread over ranks."""

    def init_device(self) -> None:
        """vLLM's own, after the hooks that this configuration needs."""
        if self.parallel_config.enable_expert_parallel:
            cpu_hooks.compute_local_experts()
        if self.parallel_config.enable_eplb:
            cpu_hooks.run_eplb_on_host()
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """vLLM's own, which on the CPU leaves out EPLB's state; the GPU runner sets it up while loading."""
        super().load_model(**kwargs)
        if self.parallel_config.enable_eplb:
            cpu_hooks.attach_eplb(self.model_runner)
