"""With RACKPLAN_COMPILE=1 the modules that a simulated request passes through are compiled by mypyc: the same sources,
the same results, two thirds of the time. Needs mypy, a C compiler and rackplan's dependencies where it runs:
`pip install --no-build-isolation`, or `make compiled`. Everything else about the package is in pyproject.toml.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

HOT = (
    "acceptance accounting adaptive block_cache cost decode_batch eplb_run faults frontend host_tier instance "
    "instance_model kv_loads kv_transfer launches lossy_transfer pool prefix_cache prefix_lines rank ranks request "
    "router scheduler sequence sessions simulate step step_load step_run streams"
)
"""Left out: what inherits from SimPy, cached properties, and frozen classes that worker processes are sent: mypyc's
cannot be unpickled."""


def compiled() -> list[Extension]:
    """mypy takes a module's name from its folders, and the packages stand at the top: it reads them through links."""
    from mypyc.build import mypycify  # type: ignore[import-untyped]

    farm = Path("build/sources/rackplan")
    farm.mkdir(parents=True, exist_ok=True)
    for source in (*(Path(p) for p in ("engine", "simulator", "calibration")), *Path("rackplan").iterdir()):
        link = farm / source.name
        if not link.exists():
            link.symlink_to(source.resolve())
    os.environ["MYPYPATH"] = str(farm.parent)
    return list(mypycify([str(farm / "simulator" / f"{name}.py") for name in HOT.split()], group_name="rackplan"))


setup(ext_modules=compiled() if os.environ.get("RACKPLAN_COMPILE") else [])
