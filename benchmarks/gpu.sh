#!/bin/sh
# The figures of gpu.md and kernels.md on one CUDA device: benchmarks/gpu.sh OUT [STEP ...]; without a STEP all of them, in order.
#
# Knows which commands make them and how long each may take. A step that fails or runs out of time leaves its log, and the next one
# runs; the status is the number of steps that failed. Ends with a table: step, status, seconds.
#
#   check       every kernel against its reference, in PARTS processes          240 s at most
#   path        the V4.1 path against the CPU's, batch invariance, the engine    480
#   kernels     every kernel beside its peers, as far as they are installed     150
#   decode      decode steps, prefill and the whole engine, against the device   260
#   drafts      throughput by the policy on measured times                      120
#   engine      the same by the whole engine (batch 1, 8, 64)                   150
#   host        the host's work of a step                                       60
#   apart       a step of 64 rows with each epilogue launched by itself         150
#   tune        candidates of all tables raced: decode, products, attention, sampling and selection   4 x 110
#
#   PARTS       processes of `check` (default: 4)
#   PYTHON      which interpreter (default: python3); one that has torch and triton for the device. Peers, wheels and caches
#               are found through PYTHONPATH, TRITON_CACHE_DIR and DG_JIT_CACHE_DIR as the caller set them
set -u
[ $# -ge 1 ] || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2; exit 2; }
out=$1 && shift
[ $# -ge 1 ] || set -- check path kernels decode apart drafts engine host tune
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 2
mkdir -p "$out"
for src in libs/*/src; do PYTHONPATH="$root/$src${PYTHONPATH:+:$PYTHONPATH}"; done
export PYTHONPATH PYTHONUNBUFFERED=1
python=${PYTHON:-python3} kernels=headrace.kernels gpu=headrace.engine.models.v41.gpu table='' failed=0

step() { # NAME SECONDS MODULE ARGUMENTS...: the log holds both streams, the JSON lines of standard output stay by themselves
    name=$1 seconds=$2 && shift 2
    began=$(date +%s)
    echo "== $name: $*"
    timeout "$seconds" "$python" -m "$@" > "$out/$name.jsonl" 2> "$out/$name.log"
    over "$name" $?
}
over() { # NAME STATUS
    [ "$2" = 0 ] || { failed=$((failed + 1)); tail -n 5 "$out/$1.log"; }
    table="$table$(printf '%-12s %6s %6s' "$1" "$2" $(($(date +%s) - began)))
"
}
check() {
    began=$(date +%s) parts=${PARTS:-4} n=0 running='' status=0
    echo "== check: $parts parts"
    while [ $n -lt "$parts" ]; do
        timeout 240 "$python" -m $kernels.check --json --part $n/"$parts" > "$out/check$n.jsonl" 2> "$out/check$n.log" &
        running="$running $!" n=$((n + 1))
    done
    for one in $running; do wait "$one" || status=$?; done
    cat "$out"/check[0-9]*.jsonl > "$out/check.jsonl"
    cat "$out"/check[0-9]*.log > "$out/check.log"
    over check $status
}

for one in "$@"; do
    case $one in
    check) check ;;
    path) step path 480 $gpu.check --rows 100 ;;
    kernels) step kernels 150 $kernels.bench --json ;;
    decode) step decode 260 $gpu.bench --json --batch 64,128,256,8,1 --engine 8,64,128,256 ;;
    apart) step apart 150 $gpu.bench --json --batch 64 --context 4096 --prefill 0 --parts 64 --apart :swiglu:rope:combine:gather:plan:all ;;
    drafts) step drafts 120 $gpu.bench_drafts --json ;;
    engine) step engine 150 $gpu.bench_drafts --engine --json --batch 1,8,64 --profile 0.8,0.7,0.6,0.5,0.4 ;;
    host) step host 60 $gpu.bench_host --json --batch 64,256 --context 4096,131072 ;;
    tune)
        step decode-tuned 110 $kernels.tune_decode --seconds 100 --json "$out/tune_decode.json"
        step gemm-tuned 110 $kernels.tune_gemm --seconds 100 --json "$out/tune_gemm.json"
        step attention-tuned 110 $kernels.tune_attention --seconds 100
        step indexer-tuned 70 $kernels.tune_indexer --seconds 58
        step rows-tuned 110 $kernels.tune --only "sample:|verify_drafts|topk|route" --processes 16 --seconds 90 --json
        ;;
    *) echo "gpu.sh: no step $one; check, path, kernels, decode, apart, drafts, engine, host or tune" >&2; exit 2 ;;
    esac
done
printf "%-12s %6s %6s\n%s\n" step status seconds "$table"
exit $failed
