"""Readers of profiles, the fits that implement the simulator's `PoolCost`, their errors, and the embedded files.

Start with physics.py. Imports rackplan.engine and rackplan.simulator.
"""
