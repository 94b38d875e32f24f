"""rackplan: plan, simulate and deploy vLLM on a rack."""

__version__ = "0.1.0"
