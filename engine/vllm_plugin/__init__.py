"""rackplan inside vLLM: a plug-in that vLLM loads through its entry points; no file of vLLM is patched.

`scheduler.py` logs every step and caps new KV loads; it is chosen with `--scheduler-cls`. `routing.py` is a skewed
expert routing, on every platform. The modules `cpu_*.py` give the CPU platform what data parallelism, expert
parallelism and EPLB need of it, which vLLM has for GPUs only; they are switched off everywhere else.
`exact_batches.py` times exact batches on engines that have no `vllm bench forward`. Start with this file: its two
functions are what vLLM calls. This is the one place of rackplan where vLLM and torch are imported by modules: vLLM
imports them, rackplan's own commands never do.
"""


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in each of its processes, before it reads its options."""
    from vllm.platforms import current_platform

    from rackplan.engine.vllm_plugin import routing

    routing.register()
    if current_platform.is_cpu():
        from rackplan.engine.vllm_plugin import cpu_hooks

        cpu_hooks.accept_eplb()


def cpu_platform_class() -> str | None:
    """Entry point of `vllm.platform_plugins`: the class to use on a CPU-only vLLM, None on any other."""
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
        return None
    return "rackplan.engine.vllm_plugin.cpu_platform.RackplanCpuPlatform"
