"""Search spaces, operating points, Optuna studies, plans to a target, what-if, economics.

Start with plan.py. Imports rackplan.engine, rackplan.simulator and rackplan.calibration.
"""
