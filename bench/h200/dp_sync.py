"""Time of the all-reduce that DP ranks make every step (7 x ranks int32 on the CPU), by algorithm and rank count.

Run: `python3 dp_sync.py OUT.csv [--ranks 2 3 4 ...] [--nccl]`. Ranks are processes of one host over loopback Gloo;
`gloo` is the library's own all-reduce, `doubling` the exchange of vLLM 0.33's `cpu_all_reduce_`: recursive doubling in
blocks of a power of two, then one exchange among blocks. `nccl` is the all-reduce of the same integers on the GPUs,
with the copy there and back. Each time is the wall time of one call, as rank 0 sees it, with the ranks in step.
Columns: algorithm, ranks, calls, median_us, p90_us, p99_us, torch.
"""

import argparse
import csv
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

INTS_PER_RANK = 7
WARM_UP, CALLS = 200, 2000


def doubling(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """In-place sum over the group, as vLLM 0.33 does it."""
    ranks, rank = group.size(), group.rank()
    block = ranks & -ranks
    scratch, mask, tag = torch.empty_like(tensor), 1, 27100
    while mask < block:
        received = group.recv([scratch], rank ^ mask, tag)
        sent = group.send([tensor], rank ^ mask, tag)
        received.wait(timedelta(0))
        sent.wait(timedelta(0))
        tensor.add_(scratch)
        mask, tag = mask << 1, tag + 1
    blocks, lane, mine = ranks // block, rank % block, rank // block
    if blocks == 1:
        return
    sums = [tensor if b == mine else torch.empty_like(tensor) for b in range(blocks)]
    works = [group.recv([s], b * block + lane, tag) for b, s in enumerate(sums) if b != mine]
    works += [group.send([tensor], b * block + lane, tag) for b in range(blocks) if b != mine]
    for work in works:
        work.wait(timedelta(0))
    tensor.copy_(torch.stack(sums).sum(0).to(tensor.dtype))


def timed(call, tensor: torch.Tensor) -> list[float]:
    times_us = []
    for i in range(WARM_UP + CALLS):
        tensor.fill_(1)
        begin = time.perf_counter_ns()
        call()
        if i >= WARM_UP:
            times_us.append((time.perf_counter_ns() - begin) / 1e3)
    return times_us


def worker(rank: int, ranks: int, port: int, nccl: bool, queue: mp.Queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if nccl else "gloo", rank=rank, world_size=ranks)
    tensor = torch.zeros(INTS_PER_RANK, ranks, dtype=torch.int32)
    if nccl:
        torch.cuda.set_device(rank)
        pinned = tensor.pin_memory()

        def on_gpu() -> None:
            there = pinned.to("cuda", non_blocking=True)
            dist.all_reduce(there)
            there.cpu()

        results = {"nccl": timed(on_gpu, pinned)}
    else:
        group = dist.group.WORLD
        doubling(tensor.fill_(1), group)
        assert bool((tensor == ranks).all()), "the doubling exchange does not sum over all ranks"
        results = {
            "gloo": timed(lambda: dist.all_reduce(tensor), tensor),
            "doubling": timed(lambda: doubling(tensor, group), tensor),
        }
    if rank == 0:
        queue.put(results)
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def measure(ranks: int, nccl: bool) -> list[list[object]]:
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = mp.spawn(worker, args=(ranks, free_port(), nccl, queue), nprocs=ranks, join=False)
    results = queue.get(timeout=60)
    processes.join()
    rows = []
    for algorithm, times_us in results.items():
        t = torch.tensor(times_us)
        quantiles = [round(float(t.quantile(q)), 2) for q in (0.5, 0.9, 0.99)]
        rows.append([algorithm, ranks, len(times_us), *quantiles, torch.__version__])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--nccl", action="store_true", help="also NCCL, over the GPUs that are there")
    args = parser.parse_args()
    jobs = [(r, False) for r in args.ranks]
    if args.nccl:
        jobs += [(r, True) for r in args.ranks if r <= torch.cuda.device_count()]
    with open(args.out, "w", newline="", buffering=1) as f:
        out = csv.writer(f)
        out.writerow(["algorithm", "ranks", "calls", "median_us", "p90_us", "p99_us", "torch"])
        for ranks, nccl in jobs:
            for row in measure(ranks, nccl):
                out.writerow(row)
                print(*row, flush=True)


if __name__ == "__main__":
    main()
