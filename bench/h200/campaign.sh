#!/usr/bin/env bash
# One stage of the campaign: ./campaign.sh STAGE [GPUS]   (see README.md; GPUS 2 unless given)
# Needs setup.sh's /tmp/env.sh, but for `sync`, which runs on any PyTorch. Results gather in /tmp/results; each stage ends
# by packing all of it into $OUT/results.tgz, also when it is cut. DRY=1 prints the commands and runs nothing.
set -u
STAGE=${1:?stage}; GPUS=${2:-2}; HERE=$(cd "$(dirname "$0")" && pwd); R=${RESULTS:-/tmp/results}; mkdir -p "$R"
cd "$R"  # in the checkout's root Python would take its `rackplan` folder for the package
[ -e /tmp/env.sh ] && [ "$STAGE" != sync ] && . /tmp/env.sh
[ -n "${DRY:-}" ] && DRY=--dry-run
pack() { [ -n "${OUT:-}" ] && tar -C "$R" -czf "$OUT/results.tgz" . 2>/dev/null; }
trap pack EXIT; trap 'exit 124' TERM INT
limit() { local s=$1; shift; timeout -k 5 "$s" "$@"; local rc=$?; [ $rc = 0 ] || echo "FAILED rc=$rc: $*"; return $rc; }
RACKPLAN=(python3 -c 'from rackplan.cli.main import run; run()')
py() { python3 "$HERE/$1.py" "${@:2}" --out "$R" ${DRY:-}; }
forward() { limit "$1" python3 "$HERE/forward.py" "$2" --ranks "$3" --out "$R" ${DRY:-} "${@:4}" || tail -n 25 "$R/bench_forward_$2_dep$3.log" | cut -c1-300; }
load() {  # seconds, plan, and the servers that must answer, the plan's own unless given
    local names=${3-$2}; [ "$2" = pd ] && names="prefill decode proxy"
    [ -n "${DRY:-}" ] || [ -z "$names" ] || py servers wait $names --gpus "$GPUS" --timeout 2 > /dev/null || { echo "SKIPPED $2: not healthy"; return; }
    limit "$1" python3 "$HERE/loads.py" "$2" --gpus "$GPUS" --out "$R" --within "$1" ${DRY:-} > "$R/loads_$2.log" 2>&1
    grep -a "^RUN" "$R/loads_$2.log" || tail -n 12 "$R/loads_$2.log" | cut -c1-300
    pack
}
up() { py servers start "$@" --gpus "$GPUS"; [ -n "${DRY:-}" ] || py servers wait "$@" --gpus "$GPUS" --timeout 290; nvidia-smi --query-gpu=memory.used --format=csv,noheader; }
down() { [ -n "${DRY:-}" ] || py servers stop "$@" --gpus "$GPUS"; }
case $STAGE in
sync) python3 "$HERE/dp_sync.py" "$R/dp_sync.csv" --nccl ;;
exact) forward 300 dep_gaps "$GPUS" ;;
serve1)
    ALL="dep prefill decode proxy agg8192_graphs512 agg8192_graphs4096"
    up $ALL
    load 100 dep
    load 130 pd
    load 80 agg8192_graphs512 & load 80 agg8192_graphs4096 & wait
    down $ALL ;;
slice) forward 400 v3_L4 "$GPUS" ;;
slice1)
    # One GPU each: the exact batches are GPU time, so two runs side by side do not disturb each other. DeepGEMM compiles
    # each kernel at its first use, which is most of the time here; a second call goes on where the first was cut.
    CUDA_VISIBLE_DEVICES=0 forward 560 v3_L4 1 & CUDA_VISIBLE_DEVICES=$((GPUS - 1)) forward 560 v3_L2 1 & wait ;;
serve2)
    ALL="agg2048_graphs512 agg2048_graphs4096"
    up $ALL
    load 80 agg2048_graphs512 & load 80 agg2048_graphs4096 & wait
    down $ALL ;;
profile1)
    # One GPU each, side by side: what a profile takes of one rank, and the slice.
    limit 570 "${RACKPLAN[@]}" profile deepseek-v2-lite --checkpoint /tmp/models/dsv2lite --out "$R/profile" --gpus 1 --budget "${BUDGET:-6m}" &
    CUDA_VISIBLE_DEVICES=$((GPUS - 1)) forward 560 v3_L4 1 & wait ;;
repeat)
    # One rank alone on the machine: rates in turns, so that drift is told from load; then another token budget. Exact
    # batches that profile_dep1 has are not timed again.
    known="$HERE/../../calibration/data/h200_dsv2lite/profile_dep1/forward_dep1.csv"
    for tokens in 8192 2048; do
        mkdir -p "$R/repeat_$tokens"; [ -e "$R/repeat_$tokens/forward_dep1.csv" ] || cp "$known" "$R/repeat_$tokens/"; known="$R/repeat_$tokens/forward_dep1.csv"
        repeats=$([ $tokens = 8192 ] && echo 4 || echo 1)
        limit 900 "${RACKPLAN[@]}" profile deepseek-v2-lite --checkpoint /tmp/models/dsv2lite --out "$R/repeat_$tokens" --repeats $repeats \
            --max-num-batched-tokens $tokens --budget "${BUDGET:-13m}"
        pack
    done ;;
profile)
    limit 900 "${RACKPLAN[@]}" profile deepseek-v2-lite --checkpoint /tmp/models/dsv2lite --out "$R/profile" --gpus "$GPUS" --budget "${BUDGET:-10m}" ;;
skew)
    up skew skew_eplb
    load 80 skew
    load 80 skew_eplb
    down skew skew_eplb ;;
order8192|order2048)
    # Each deployment whose servers answer, until the time is out; ONLY="1p3d_b8192 ..." leaves the others out.
    ALL=$(python3 "$HERE/order.py" "$STAGE" --gpus "$GPUS" --out "$R" ${ONLY:+--only $ONLY}) || exit 2
    up $ALL
    load $((${ORDER_S:-450} - SECONDS - 15)) "$STAGE" ""
    down $ALL ;;
deploy)
    limit 400 "${RACKPLAN[@]}" deploy "$HERE/pd.yaml" --model /tmp/models/dsv2lite --calibration h200-v2-lite --state "$R/state" \
        --workload fixed:2048/256 --rate 6 --requests 150 --json
    limit 60 "${RACKPLAN[@]}" status --state "$R/state"
    limit 60 "${RACKPLAN[@]}" stop --state "$R/state" ;;
*) echo "no stage $STAGE"; exit 2 ;;
esac
