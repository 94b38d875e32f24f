#!/usr/bin/env bash
# On the CUDA machine: ./setup.sh PARTS_DIR   unpacks the bundle into /tmp/site, makes the model folders in /tmp/models and
# writes /tmp/env.sh (source it). The machine needs nothing from outside.
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
python3 -m pip install -q --no-index --no-deps --target /tmp/unpack "$1"/zstandard-*.whl
mkdir -p /tmp/site
PYTHONPATH=/tmp/unpack python3 - "$1"/part.?? <<'P' | tar -C /tmp/site -xf -
import io, shutil, sys
import zstandard
class Parts(io.RawIOBase):
    """The parts, one after the other, as one stream."""
    def __init__(self, paths): self.files = iter(paths); self.now = open(next(self.files), "rb")
    def readable(self): return True
    def readinto(self, buffer):
        while not (n := self.now.readinto(buffer)):
            path = next(self.files, None)
            if path is None: return 0
            self.now = open(path, "rb")
        return n
shutil.copyfileobj(zstandard.ZstdDecompressor().stream_reader(Parts(sys.argv[1:])), sys.stdout.buffer, 1 << 22)
P
SYS=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
rm -rf "$SYS"/torchvision* "$SYS"/torchaudio*      # built for the machine's own, older torch: transformers would import them and fail
for d in "$SYS"/nvidia/*; do b=$(basename "$d"); [ -e "/tmp/site/nvidia/$b" ] || ln -s "$d" "/tmp/site/nvidia/$b"; done
# What the machine lacks of rackplan's needs; then its packages, linked by hand: vLLM finds the plug-in in them through the
# entry points of pyproject.toml.
python3 -m pip install -q --no-index --no-deps --target /tmp/site "$1"/rp/*.whl
ROOT=$(realpath "$HERE/../.."); INFO=/tmp/site/rackplan-0.1.0.dist-info
mkdir -p /tmp/site/rackplan "$INFO"
for p in engine simulator calibration tuner cli; do ln -sfn "$ROOT/$p" "/tmp/site/rackplan/$p"; done
ln -sf "$ROOT/rackplan/__init__.py" /tmp/site/rackplan/
printf 'Metadata-Version: 2.1\nName: rackplan\nVersion: 0.1.0\n' > "$INFO/METADATA"
python3 - "$ROOT/pyproject.toml" > "$INFO/entry_points.txt" <<'P'
import sys, tomllib
groups = tomllib.load(open(sys.argv[1], "rb"))["project"]["entry-points"]
for group, points in groups.items():
    print(f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), sep="\n")
P
NVCC=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc)
cat > /tmp/env.sh <<X2
export CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$NVCC")")")
X2
cat >> /tmp/env.sh <<'X2'
export PYTHONPATH=/tmp/site LD_LIBRARY_PATH=/tmp/site/nvidia/nccl/lib:${LD_LIBRARY_PATH:-}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1 VLLM_HOST_IP=127.0.0.1
export VLLM_USE_FLASHINFER_SAMPLER=0                # FlashInfer is not in the bundle
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1   # NVLink multicast stays off
X2
. /tmp/env.sh
python3 "$HERE/models.py" /tmp/models & MODELS=$!
cd /tmp; python3 -c 'import torch, triton, vllm; from nixl._api import nixl_agent; print("ready", torch.__version__, vllm.__version__, torch.cuda.device_count(), "GPU")'
wait $MODELS
