#!/usr/bin/env bash
# Packs vLLM 0.33.0 + PyTorch 2.14.0 + NIXL for a CUDA 13.0 x86-64 machine that has Python 3.12, a CUDA 13.0 toolkit
# with cuDNN, transformers 5.17, numpy and numba, but no package index.
#   PY=python3.12 ./make_bundle.sh DEST     writes DEST/part.00 ... (56 MiB each) and DEST/zstandard-*.whl to unpack them
# Needs zstd, 15 GB of disk, about 6 minutes. setup.sh unpacks.
set -euo pipefail
DEST=$(realpath -m "${1:?DEST}"); PY=${PY:-python3.12}; W=$(mktemp -d "${TMPDIR:-/tmp}/bundle.XXXX"); mkdir -p "$DEST"
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
"$PY" -m venv "$W/v"; PIP="$W/v/bin/python -m pip"; S="$W/site"
$PIP install -q --target "$S" --no-deps torch==2.14.0
# The machine has its own CUDA libraries, older than this torch needs only in Triton and NCCL.
mapfile -t NEEDS < <(sed -nE 's/^Requires-Dist: (triton|nvidia-nccl-cu13)([~=]=[0-9.]+).*/\1\2/p' "$S"/torch-2.14.0.dist-info/METADATA)
echo "with ${NEEDS[*]}"
$PIP install -q --target "$S" --no-deps "${NEEDS[@]}" vllm==0.33.0 torchvision==0.29.0 compressed-tensors==0.17.0 xgrammar==0.2.8 \
    lm-format-enforcer==0.11.3 llguidance==1.7.0 outlines_core==0.2.14 gguf mistral_common nvtx==0.2.15 quack-kernels==0.6.5 nixl nixl-cu13
$PIP install -q --target "$S" cachetools blake3 'fastapi<0.137.0,>=0.133.0' uvicorn uvloop httptools python-multipart email-validator \
    'starlette>=1.0.1' 'openai>=2.25' 'pydantic>=2.12' prometheus_client 'prometheus-fastapi-instrumentator>=8' interegular lark==1.2.2 \
    partial-json-parser jsonschema pyzmq msgspec depyf==0.20.0 cloudpickle watchfiles python-json-logger pybase64 cbor2 ijson setproctitle \
    oss-harmony orjson 'anthropic>=0.71' 'model-hosting-container-standards<1' 'mcp<3,>=2.2' opentelemetry-sdk opentelemetry-api \
    opentelemetry-exporter-otlp opentelemetry-semantic-conventions-ai loguru tiktoken aiohttp pydantic-extra-types pycountry apache-tvm-ffi==0.1.11
$PIP download -q --no-deps -d "$DEST" zstandard
$PIP download -q --no-deps -d "$DEST/rp" simpy
cd "$S"
rm -rf include torch/include torch/test triton/backends/amd triton/profiler triton/backends/nvidia/bin/{cuobjdump,nvdisasm} bin nixl_ep* \
    setuptools _distutils_hack distutils-precedence.pth flashinfer* vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so
sed -i '/^amd = /d' triton-3.8.*.dist-info/entry_points.txt          # else importing triton fails
ls -d .nixl_cu13.mesonpy.libs > /dev/null                            # hidden folder; without it NIXL is "not available"
find . -name __pycache__ -prune -exec rm -rf {} +
tar -cf - . | zstd -q -8 -T0 | split -b 56M -d -a 2 - "$DEST/part."
ls "$DEST" | wc -l
if [ -z "${KEEP:-}" ]; then rm -rf "$W"; else echo "$W"; fi
