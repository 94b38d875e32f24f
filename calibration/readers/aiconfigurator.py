"""AIConfigurator's tables of measured operators, through the optional `aiconfigurator-core`; and a gate before them.

A table holds times of one operator by shape and data type. Of some families the times are the host's: between two
launches the GPU waited, so that no shape takes less than the gap. Such a family is dropped whole, and what is faster
than the hardware is dropped row by row; what was dropped is said.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackplan.calibration.readers import parse
from rackplan.engine import GpuSpec, InputError, gpu_spec

SYSTEMS = {"h200": "h200_sxm", "gb200": "gb200", "gb300": "gb300"}
DTYPES = {"bfloat16": ("bf16", 2.0), "fp8": ("fp8", 1.0), "fp8_block": ("fp8", 1.0), "nvfp4": ("fp4", 0.5)}
"""By the tables' name: whose peak it runs at, and bytes of a weight. Others are left out."""
HOST_GAP_MS = 0.03
"""No kernel needs this long for its shortest shape beyond the roofline; a launch between two does."""
FASTER_THAN_ROOFLINE = 0.6
"""Of the roofline's time: less is a mistake, not a cache."""
GEMM_COLUMNS = ("gemm_dtype", "m", "n", "k", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One measured matrix product: (m, k) x (k, n), ms."""

    dtype: str
    m: int
    n: int
    k: int
    ms: float

    def flop_ms(self, gpu: GpuSpec) -> float:
        """Its multiply-adds at the GPU's peak."""
        return 2.0 * self.m * self.n * self.k / (gpu.dense_tflops[DTYPES[self.dtype][0]] * 1e9)

    def read_ms(self, gpu: GpuSpec) -> float:
        """Its operands at the rate of the GPU's memory; what it writes is 16 bits wide."""
        width = DTYPES[self.dtype][1]
        return ((self.n + self.m) * self.k * width + self.m * self.n * 2.0) / (gpu.hbm_tb_s * 1e9)

    def roofline_ms(self, gpu: GpuSpec) -> float:
        """The least that the hardware allows."""
        return max(self.flop_ms(gpu), self.read_ms(gpu))


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """What passed the gate, and one line for each thing that did not."""

    rows: tuple[Gemm, ...]
    dropped: tuple[str, ...]


def read_gemms(gpu: str, folder: Path | None = None) -> GemmTable:
    """vLLM's newest table of matrix products on `gpu`. `folder`: where the tables lie, in the package unless given.

    Raises InputError where the package is missing or has no such table, or with file and row on a bad one.
    """
    if gpu not in SYSTEMS:
        raise InputError(f"gpu={gpu}: has no table; one of {', '.join(SYSTEMS)}")
    data = (folder or _package()) / "data" / SYSTEMS[gpu] / "gemm" / "vllm"
    tables = sorted(data.glob("*/gemm_perf.parquet"), key=lambda p: _version(p.parent.name))
    if not tables:
        raise InputError(f"{data}: holds no table; aiconfigurator-core 0.12 has it")
    return plausible(gemms_of(_columns(tables[-1]), str(tables[-1])), gpu_spec(gpu))


def _package() -> Path:
    from importlib.util import find_spec

    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("aiconfigurator-core is not installed; pip install 'rackplan[aiconfigurator]'")
    return Path(spec.submodule_search_locations[0]) / "systems"


def _version(name: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in name.split("."))


def _columns(path: Path) -> Mapping[str, Sequence[Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InputError("pyarrow is not installed; pip install 'rackplan[aiconfigurator]'") from None
    try:
        columns: Mapping[str, Sequence[Any]] = parquet.read_table(path).to_pydict()
    except (ArrowException, OSError) as e:
        raise InputError(
            f"{path}: not a table that can be read ({type(e).__name__}); install the package anew"
        ) from None
    return columns


def gemms_of(columns: Mapping[str, Sequence[Any]], where: str) -> list[Gemm]:
    """The rows of a table in whose data types models are served; `latency` is ms."""
    if missing := [c for c in GEMM_COLUMNS if c not in columns]:
        raise InputError(f"{where}: column {missing[0]} is missing; needed are {', '.join(GEMM_COLUMNS)}")
    found = []
    for i, values in enumerate(zip(*(columns[c] for c in GEMM_COLUMNS), strict=True)):
        row = dict(zip(GEMM_COLUMNS, values, strict=True))
        if row["gemm_dtype"] in DTYPES:
            m, n, k = (parse.whole(row, c, f"{where}:{i}", 1) for c in ("m", "n", "k"))
            ms = parse.number(row, "latency", f"{where}:{i}", 1e-5, parse.MOST_STEP_MS)
            found.append(Gemm(dtype=row["gemm_dtype"], m=m, n=n, k=k, ms=ms))
    return found


def plausible(rows: Iterable[Gemm], gpu: GpuSpec) -> GemmTable:
    """The rows that the hardware can have made and that hold no host gap."""
    families: dict[str, list[Gemm]] = defaultdict(list)
    for row in rows:
        families[row.dtype].append(row)
    kept, dropped = [], []
    for dtype, family in families.items():
        gap_ms = min(r.ms - r.roofline_ms(gpu) for r in family)
        if gap_ms > HOST_GAP_MS:
            dropped.append(
                f"{dtype}: {len(family)} rows on {gpu.name}: the shortest takes {gap_ms * 1e3:.0f} us beyond the "
                "roofline, as a host does between two launches"
            )
            continue
        real = [r for r in family if r.ms >= FASTER_THAN_ROOFLINE * r.roofline_ms(gpu)]
        if len(real) < len(family):
            dropped.append(f"{dtype}: {len(family) - len(real)} rows on {gpu.name}: faster than the hardware can be")
        kept += real
    return GemmTable(rows=tuple(kept), dropped=tuple(dropped))


def efficiencies(table: GemmTable, gpu: GpuSpec) -> dict[str, dict[str, float]]:
    """By data type, the shares of peak that large products reach: `flop` where arithmetic binds, `read` where reading
    the weights does. Medians of the rows that are bound by one of the two at least four times over; what has no such
    row is left out."""
    import numpy as np

    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table.rows:
        flop, read = row.flop_ms(gpu), row.read_ms(gpu)
        if max(flop, read) > 10 * HOST_GAP_MS and max(flop, read) > 4 * min(flop, read):
            shares[row.dtype]["flop" if flop > read else "read"].append(max(flop, read) / row.ms)
    return {dtype: {k: float(np.median(v)) for k, v in by.items()} for dtype, by in shares.items()}


def operators(gpu: str) -> dict[str, Any]:
    """{"gpu", "dtypes": [{"dtype", "rows", "flop_share", "read_share"}], "dropped"}: what the tables of `gpu` say of
    its matrix products, to hold a calibration's efficiencies against. Shares are None where no row is bound by that
    side. Raises InputError as `read_gemms` does."""
    table = read_gemms(gpu)
    shares = efficiencies(table, gpu_spec(gpu))
    dtypes = [
        {
            "dtype": dtype,
            "rows": sum(r.dtype == dtype for r in table.rows),
            "flop_share": shares.get(dtype, {}).get("flop"),
            "read_share": shares.get(dtype, {}).get("read"),
        }
        for dtype in sorted({r.dtype for r in table.rows})
    ]
    return {"gpu": gpu, "dtypes": dtypes, "dropped": list(table.dropped)}
