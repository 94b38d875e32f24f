"""A program that behaves as `python` with vLLM does, for tests of what starts, asks and ends it.

Run as `fake_engine.py ARGS`: `-c CODE` runs the code with a vLLM distribution to be found; `-m
vllm.entrypoints.cli.main serve` answers on its port, starts a worker of its own and writes the configuration that it
was told; `... bench serve` sends the load and writes a result. FAULTS (a file beside this program's copy, one word a
line) makes it fail: `die`, `sick`, `ignore-seqs`, `old-pod`, `stubborn`, `slow`.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULTS = (HERE / "faults").read_text().split() if (HERE / "faults").exists() else []


def option(argv: list[str], name: str, default: str | None = None) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else default


def number(argv: list[str], name: str, default: int = 0) -> int:
    return int(option(argv, name, str(default)) or default)


def config_of(argv: list[str]) -> dict:
    """What an engine says of itself, from its own command line, in the plug-in's words."""
    transfer = json.loads(option(argv, "--kv-transfer-config", "{}") or "{}")
    cap = os.environ.get("RACKPLAN_MAX_NEW_KV_LOADS_PER_STEP")
    seqs = number(argv, "--max-num-seqs")
    return {
        "max_model_len": number(argv, "--max-model-len"),
        "max_num_batched_tokens": number(argv, "--max-num-batched-tokens"),
        "max_num_seqs": seqs // 2 if "ignore-seqs" in FAULTS else seqs,
        "long_prefill_token_threshold": number(argv, "--long-prefill-token-threshold"),
        "prefill_schedule_interval": number(argv, "--prefill-schedule-interval", 1),
        "enable_prefix_caching": "--enable-prefix-caching" in argv,
        "async_scheduling": "--async-scheduling" in argv,
        "data_parallel_size": number(argv, "--data-parallel-size", 1),
        "tensor_parallel_size": number(argv, "--tensor-parallel-size", 1),
        "enable_expert_parallel": "--enable-expert-parallel" in argv,
        "enable_eplb": "--enable-eplb" in argv,
        "enable_dbo": "--enable-dbo" in argv,
        "offload": {"prefetch": {"offload_group_size": 0}},
        "speculative": None,
        "kv_role": transfer.get("kv_role"),
        "max_new_kv_loads_per_step": int(cap) if cap else None,
        "revision": "an older one" if "old-pod" in FAULTS else os.environ["RACKPLAN_REVISION"],
    }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        well = self.path != "/health" or "sick" not in FAULTS
        self.send_response(200 if well else 503)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": {"from": "fake"}, "asked": body})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: object) -> None:
        pass


def serve(argv: list[str]) -> None:
    if "die" in FAULTS:
        print("RuntimeError: no memory for the KV pool")
        sys.exit(1)
    if "stubborn" in FAULTS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # As vLLM's engine core: a process of its own, in a session of its own.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    folder, name = Path(os.environ["RACKPLAN_STEP_LOG_DIR"]), os.environ["RACKPLAN_SERVER_NAME"]
    for rank in range(number(argv, "--data-parallel-size", 1)):
        (folder / f"config_{name}.dp{rank}.json").write_text(json.dumps(config_of(argv)))
    ThreadingHTTPServer((option(argv, "--host") or "", number(argv, "--port")), Handler).serve_forever()


def bench(argv: list[str]) -> None:
    """A load of equal requests, one after the other: TTFT 0.1 s, 10 ms a token; `slow` takes ten times that."""
    count, pace = number(argv, "--num-prompts"), 10.0 if "slow" in FAULTS else 1.0
    outputs = number(argv, "--random-output-len")
    rate = float(option(argv, "--request-rate") or "inf")
    starts = [i / rate for i in range(count)]
    ttft, itl = 0.1 * pace, 0.01 * pace
    result = {
        "backend": "vllm",
        "num_prompts": count,
        "completed": count,
        "failed": 0,
        "request_rate": "inf" if rate == float("inf") else rate,
        "max_concurrency": number(argv, "--max-concurrency", 0) or None,
        "duration": starts[-1] + ttft + outputs * itl,
        "input_lens": [number(argv, "--random-input-len")] * count,
        "output_lens": [outputs] * count,
        "start_times": starts,
        "ttfts": [ttft] * count,
        "itls": [[itl] * (outputs - 1)] * count,
        "generated_texts": ["x"] * count,
        "mean_ttft_ms": 1e3 * ttft,
        "median_ttft_ms": 1e3 * ttft,
        "mean_tpot_ms": 1e3 * itl,
        "median_tpot_ms": 1e3 * itl,
        "request_throughput": count / (starts[-1] + 1),
        "output_throughput": count * outputs / (starts[-1] + ttft + outputs * itl),
    }
    path = Path(option(argv, "--result-dir") or "") / (option(argv, "--result-filename") or "")
    path.write_text(json.dumps(result))


def main(argv: list[str]) -> None:
    if argv[0] == "-c":
        print(json.dumps({"vllm": "0.32.0+cpu"}))
    elif argv[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"]:
        serve(argv[3:])
    elif argv[:4] == ["-m", "vllm.entrypoints.cli.main", "bench", "serve"]:
        bench(argv[4:])
    else:
        sys.exit(f"fake engine: cannot {argv}")


if __name__ == "__main__":
    main(sys.argv[1:])
