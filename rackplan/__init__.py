"""rackplan: plan, simulate and deploy vLLM on a rack."""
