"""Workloads and the discrete-event model of a vLLM deployment.

Start with simulate.py, then instance.py, ranks.py and scheduler.py. Imports rackplan.engine only; nothing else imports
SimPy.
"""
