"""Expert popularity by a Zipf law, in place of the routing that random weights give (almost even).

Chosen with VLLM_MOE_ROUTING_SIMULATION_STRATEGY=zipf; RACKPLAN_ZIPF is the exponent (default 0.5). Expert e has weight
(e + 1)**-s in every layer, so with linear placement the first rank of two carries 67 % of the tokens at s = 0.5 and 64
experts, top 6. Draws are without replacement (Gumbel top-k) and safe inside a captured CUDA graph. The strategy makes
no router logits, so vLLM 0.33 takes a modular expert kernel with it, never one that routes inside.
"""

import os

STRATEGY = "zipf"


def exponent() -> float:
    """RACKPLAN_ZIPF. Raises ValueError if it is not a number from 0 (even) to 8."""
    text = os.environ.get("RACKPLAN_ZIPF", "0.5")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 8:
        raise ValueError(f"RACKPLAN_ZIPF={text}: must be a number from 0 (even) to 8")
    return value


def register() -> None:
    """Registers the strategy where the environment asks for it."""
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") != STRATEGY:
        return
    import torch
    from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulator

    s = exponent()
    log_weights: dict[tuple[int, torch.device], torch.Tensor] = {}

    class Zipf(simulator.RoutingStrategy):
        def route_tokens(self, hidden_states, router_logits, top_k, indices_type=None):
            tokens, experts = router_logits.shape
            device = hidden_states.device
            if (experts, device) not in log_weights:
                rank = torch.arange(1, experts + 1, dtype=torch.float32, device=device)
                log_weights[experts, device] = -s * torch.log(rank)
            uniform = torch.rand(tokens, experts, device=device).clamp(1e-9, 1 - 1e-7)
            scores = log_weights[experts, device] - torch.log(-torch.log(uniform))
            ids = scores.topk(top_k, -1).indices
            weights = torch.full((tokens, top_k), 1.0 / top_k, device=device)
            # The CPU's expert kernel takes 32-bit ids, and vLLM asks it for no type.
            return weights, ids.to(indices_type or (torch.int32 if device.type == "cpu" else torch.int64))

    simulator.RoutingSimulator.register_strategy(STRATEGY, Zipf())
