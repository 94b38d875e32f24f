"""GPU time by cause. Every nanosecond of every GPU of an instance is booked once, so the causes add up to all of it."""

from rackplan.simulator.request import NS_PER_MS
from rackplan.simulator.step import CAUSES
from rackplan.simulator.step_run import StepSums

_NS_PER_MS = float(NS_PER_MS)


class GpuTime:
    """GPU-ns of one instance by cause (see CAUSES)."""

    def __init__(self, gpus: int) -> None:
        self._gpus = float(gpus)  # Python multiplies floats with one another faster than with integers
        self.ns = dict.fromkeys(CAUSES, 0.0)

    def book_idle(self, cause: str, ns: int) -> None:
        """Book `ns` in which no step ran, on all GPUs, to `cause`; "failed" is none of a run without failures."""
        self.ns[cause] = self.ns.get(cause, 0.0) + ns * self._gpus

    def book_steps(self, sums: StepSums, idle_share: float, idle_cause: str) -> None:
        """Book a run of steps. `idle_share`: ranks without a request, which run dummy batches; their GPU time goes to
        `idle_cause`. What is beyond the GPU's time is the sync's where the step would be shorter without it, else the
        host's, and so is waiting for weights from host memory."""
        total, shared = sums.wall_ns, sums.shared
        busy_ns = (1.0 - idle_share) * sums.steps
        gpu = sums.gpu_ms * _NS_PER_MS
        if gpu > total:
            gpu = total
        sync = sums.sync_ms * _NS_PER_MS
        if sync > total - gpu:
            sync = total - gpu
        slowest = sums.attention_ms * _NS_PER_MS
        skew = slowest - sums.attention_mean_ms * _NS_PER_MS  # idle ranks' share is in their dummy batches
        host = total - gpu - sync + busy_ns * shared.weight_wait * _NS_PER_MS
        ep_imbalance = busy_ns * shared.ep_imbalance * _NS_PER_MS
        dp_imbalance = skew - idle_share * slowest
        if dp_imbalance < 0.0:
            dp_imbalance = 0.0
        dummies = idle_share * gpu
        ns, gpus = self.ns, self._gpus
        if idle_cause == "dp_imbalance":
            dp_imbalance += dummies
            dummies = 0.0
        else:
            ns[idle_cause] += dummies * gpus
        ns["dp_sync"] += sync * gpus
        ns["host"] += host * gpus
        ns["ep_imbalance"] += ep_imbalance * gpus
        ns["dp_imbalance"] += dp_imbalance * gpus
        ns["compute"] += (total - (sync + host + ep_imbalance + dp_imbalance + dummies)) * gpus
