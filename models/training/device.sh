#!/bin/sh
# Train headrace-tiny on one CUDA device in calls of at most ten minutes: device.sh data | smoke | begin |
# own | pretrain | anneal | draft.
#
# Knows the order of commands and what must come back. Needs python3 with torch, numpy, tokenizers, safetensors and pillow; what
# else is missing may lie as wheels in .whl/. Everything is made in run/, which a machine that stays keeps; else $OUT/carry (CARRY
# names where it was put) brings the weights to the next stage.
#
#   device.sh data            packs the data of all stages, in order of need; runs beside anything, a stage waits for its own data
#   device.sh smoke           a few steps of each stage, compiled, then eager; speed and memory in $OUT/smoke.log
#   device.sh begin CHECKPOINT  a run from an exported checkpoint instead of from nothing; anneal goes on from its weights
#   device.sh STAGE MINUTES [LIMIT]  trains a stage so long, compiling included, and of that at most LIMIT minutes in this call;
#                             called again with the same MINUTES it goes on from its last save. `anneal` begins when the first
#                             parts of its data are there, if `data` packs it beside, and takes in the others as they come
#   device.sh own SECONDS     the target answers prompts on the CPU, for its draft; runs beside the anneal stage
#
#   OUT      where results are left                        (default: run/out)
#   CARRY    pieces that an earlier stage left in $OUT     (default: run/carry)
#   CONFIG   which model                                   (default: tiny)
#   KINDS    which stages `data` packs for                 (default: pretrain anneal draft)
#   PROBE    seconds between probes of held-out answers    (default: 100; 0: none)
#   FAST     how to compute, options of `train`            (default: 65,536 tokens a step, compiled, bf16; on a CPU 4,096)
#   SCALE    tokens of data are multiplied by this; 0.02 with CONFIG=micro and few MINUTES rehearses on a CPU
set -eu
stage=$1 length=${2:-} limit=${3:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
OUT=${OUT:-run/out} CARRY=${CARRY:-run/carry} CONFIG=${CONFIG:-tiny} SCALE=${SCALE:-1}
FIRST=15 # parts, of half a million tokens: enough to begin with
run=run/$CONFIG data=run/data tokenizer=models/training/tokenizer.json
mkdir -p "$OUT" $data
if [ -d .whl ]; then
    flock run/site.lock sh -c '[ -d run/site ] || python3 -m pip install -q --no-index --no-deps --no-compile --target run/site .whl/*.whl'
    PYTHONPATH="$root/run/site"
fi
for src in libs/*/src; do PYTHONPATH="$root/$src${PYTHONPATH:+:$PYTHONPATH}"; done
export PYTHONPATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR="$root/run/inductor"
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

cuda=$(python3 -c 'import torch; print(int(torch.cuda.is_available()))')
[ "$cuda" = 1 ] && fast="--tokens 65536 --compile --bf16" || fast="--tokens 4096"
fast=${FAST:-$fast} probe="--probe-seconds ${PROBE:-100}"
[ "$stage" != draft ] || probe=

do_() { echo "== $*" && python3 -m models.training "$@"; }
pack() { # FOLDER MIX TOKENS: one process at a time; who comes later finds it made
    tokens=$(python3 -c "print(max(3e4, $3 * $SCALE))")
    echo "== pack $1"
    flock "$data/$1.lock" nice python3 -m models.training pack "$data/$1" --tokenizer $tokenizer --mix "$2" --tokens "$tokens" \
        --context 1024 2048 --seed "$1" > "$data/$1.log" 2>&1 || { cat "$data/$1.log"; return 1; }
    tail -1 "$data/$1.log"
}
data_of() {
    case $1 in
    pretrain) pack pretrain pretrain 180e6 ;;
    anneal) pack anneal anneal 120e6 ;;
    draft) pack draft anneal 24e6 ;;
    esac
}
train() { # RUN STAGE DATA... OPTIONS...
    where=$1 which=$2 && shift 2
    rate=4e-3 && [ "$which" != draft ] || rate=3e-3
    do_ train "$where" --stage "$which" --config "$CONFIG" --tokenizer $tokenizer --rate $rate --index-every 2 "$@"
}
smoke() { # RUN STEPS OPTIONS: what fails is shown, the next one is tried all the same
    folder=$1 steps=$2 && shift 2
    for which in pretrain anneal draft; do
        train "$folder" $which --data $data/smoke --steps "$steps" --report-seconds 0 "$@" || echo "FAILED: $which $*"
    done
}

case $stage in
data) for which in ${KINDS:-pretrain anneal draft}; do data_of $which; done ;;
begin) do_ begin "$run" "$length" ;;
smoke)
    pack smoke anneal "$(python3 -c "print(2e6 / $SCALE)")"
    {
        smoke run/smoke 12 $fast
        smoke run/smoke-eager 3 --tokens 32768 --bf16
    } 2>&1 | tee "$OUT/smoke.log"
    ;;
own)
    do_ export "$run" run/target
    nice python3 -m models.training own run/target $data/own --mix anneal --seconds "$length"
    ;;
pretrain | anneal | draft)
    if [ ! -d "$run" ] && [ -d "$CARRY" ]; then do_ carry "$run" "$CARRY" --back; fi
    more=
    if [ "$stage" = anneal ] && ! flock -n $data/anneal.lock true; then # it is being packed
        until [ "$(find $data/anneal -name 'c2048-*.npz' 2> /dev/null | wc -l)" -ge $FIRST ] || flock -n $data/anneal.lock true; do sleep 1; done
        more=--growing
    else
        data_of "$stage"
    fi
    [ "$stage" = draft ] && ls $data/own/*.npz > /dev/null 2>&1 && more=$data/own
    train "$run" "$stage" --data $data/"$stage" $more --minutes "$length" ${limit:+--limit-minutes "$limit"} \
        --save-seconds 100 --report-seconds 5 $probe $fast
    rm -rf "$OUT/carry" && do_ carry "$run" "$OUT/carry"
    cp "$run/log.jsonl" "$OUT/"
    ;;
*)
    echo "device.sh: no stage $stage; data, smoke, begin, own, pretrain, anneal or draft" >&2
    exit 2
    ;;
esac
