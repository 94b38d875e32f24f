"""GPU time by cause. Every nanosecond of every GPU of an instance is booked once, so the causes add up to all of it."""

import numpy as np

from rackplan.simulator.step import CAUSES, StepTimes


class GpuTime:
    """GPU-ns of one instance by cause (see CAUSES)."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.ns = dict.fromkeys(CAUSES, 0.0)

    def book_idle(self, cause: str, ns: int) -> None:
        """Book `ns` in which no step ran, on all GPUs, to `cause`."""
        self.ns[cause] += ns * self.gpus

    def book_steps(self, times: StepTimes, wall_ns: np.ndarray, idle_share: float, idle_cause: str) -> None:
        """Book a run of steps. `idle_share`: ranks without a request, which run dummy batches; their GPU time goes to
        `idle_cause`. What is beyond the GPU's time is the sync's where the step would be shorter without it, else the
        host's, and so is waiting for weights from host memory."""
        steps = len(wall_ns)
        add = np.add.reduce  # as `sum` does, without its wrapper
        total = float(add(wall_ns))
        gpu = min(total, float(add(times.gpu_ms)) * 1e6)
        sync = min(total - gpu, float(add(times.wall_ms - times.wall_without_sync_ms)) * 1e6)
        slowest = float(add(times.attention_ms)) * 1e6
        skew = slowest - float(add(times.attention_mean_ms)) * 1e6  # idle ranks' share is in their dummy batches
        lost = {
            "dp_sync": sync,
            "host": total - gpu - sync + (1.0 - idle_share) * steps * times.shared.weight_wait * 1e6,
            "ep_imbalance": (1.0 - idle_share) * steps * times.shared.ep_imbalance * 1e6,
            "dp_imbalance": max(0.0, skew - idle_share * slowest),
        }
        lost[idle_cause] = lost.get(idle_cause, 0.0) + idle_share * gpu
        for cause, ns in lost.items():
            self.ns[cause] += ns * self.gpus
        self.ns["compute"] += (total - sum(lost.values())) * self.gpus
