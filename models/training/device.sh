#!/bin/sh
# Train headrace-tiny on one machine with a CUDA device, in three runs of at most ten minutes: device.sh pretrain | anneal | draft.
#
# Knows the order of commands, their time budgets, and what must come back. Needs python3 with torch, numpy, tokenizers,
# safetensors and pillow; msgspec and llguidance may lie as wheels in .whl/. Everything is made in run/tiny, which a machine that
# stays keeps; else $OUT/carry (CARRY names where it was put) brings the weights to the next run.
#
#   OUT      where results are left                        (default: run/out)
#   CARRY    pieces that an earlier run left in $OUT       (default: run/carry)
#   CONFIG   which model                                   (default: tiny)
#   SCALE    minutes of a stage are multiplied by this; 0.02 with CONFIG=micro rehearses on a CPU
set -eu
stage=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
OUT=${OUT:-run/out} CARRY=${CARRY:-run/carry} CONFIG=${CONFIG:-tiny} SCALE=${SCALE:-1}
run=run/$CONFIG data=run/data
mkdir -p "$OUT" run
if [ -d .whl ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
    PYTHONPATH=/tmp/site
fi
for src in libs/*/src; do PYTHONPATH="$root/$src${PYTHONPATH:+:$PYTHONPATH}"; done
export PYTHONPATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR="$root/run/inductor"
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

do_() { echo "== $*" && python3 -m models.training "$@"; }
minutes() { python3 -c "print($1 * $SCALE)"; }
tokens() { python3 -c "print(max(3e4, $1 * $SCALE))"; }

if [ ! -d "$run" ] && [ -d "$CARRY" ]; then do_ carry "$run" "$CARRY" --back; fi
cuda=$(python3 -c 'import torch; print(int(torch.cuda.is_available()))')
fast="--tokens 131072 --probe --compile --bf16"
[ "$cuda" = 1 ] || fast="--tokens 4096"
case $stage in
pretrain) # about 9.5 minutes: data 1, probe and compiling 1.5, training 6.5
    do_ pack $data/pretrain --tokenizer models/training/tokenizer.json --mix pretrain --tokens "$(tokens 150e6)" --context 2048
    do_ train "$run" --stage pretrain --data $data/pretrain --config "$CONFIG" --tokenizer models/training/tokenizer.json \
        --minutes "$(minutes 6.5)" --rate 4e-3 --save-seconds 120 --report-seconds 2 $fast
    ;;
anneal) # about 9.5 minutes: data 0.5, probe and compiling 2, training 6.5
    do_ pack $data/anneal --tokenizer models/training/tokenizer.json --mix anneal --tokens "$(tokens 80e6)" --context 2048
    do_ train "$run" --stage anneal --data $data/anneal --minutes "$(minutes 6.5)" --rate 4e-3 --save-seconds 120 \
        --report-seconds 2 $fast
    ;;
draft) # about 9 minutes: the target says its own 1.5 (in the meantime data), training 5.5
    do_ export "$run" run/target
    do_ own run/target $data/own --mix anneal --seconds "$(minutes 90)" &
    own=$!
    do_ pack $data/draft --tokenizer models/training/tokenizer.json --mix anneal --tokens "$(tokens 20e6)" --context 2048 \
        --seed draft --workers 4
    wait $own
    do_ train "$run" --stage draft --data $data/own $data/draft --minutes "$(minutes 5.5)" --rate 3e-3 --save-seconds 120 \
        --report-seconds 2 $fast
    ;;
*)
    echo "device.sh: no stage $stage; pretrain, anneal or draft" >&2
    exit 2
    ;;
esac
rm -rf "$OUT/carry" && do_ carry "$run" "$OUT/carry"
cp "$run/log.jsonl" "$OUT/"
