#!/usr/bin/env bash
# Everything behind docs/results.md and docs/options.md: trains each kind of head and each option on one corpus, evaluates, tabulates.
#   bash scripts/results.sh kinds|options [KEY=VALUE ...]    overrides go to every command
# Hours on 2 CPU cores; the two parts can run beside each other once the corpus is there, one thread each (OMP_NUM_THREADS=1).
# Killed and started again, it continues: what has a report is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part=${1:-}
if [ "$part" != kinds ] && [ "$part" != options ]; then
    echo "error: the first argument is '$part'; give kinds (docs/results.md) or options (docs/options.md)" >&2
    exit 2
fi
shift
source scripts/setup.sh ""

base=recipes/smollm2-135m-eagle3-quick.yaml
corpus=corpus=runs/smollm2-135m-eagle3-quick/corpus
overrides=("$@")
launch=(accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)

# evaluate RECIPE RUN LABEL [KEY=VALUE ...]: a report, unless it is there
evaluate() {
    local recipe=$1 run=$2 label=$3
    shift 3
    if [ ! -e "runs/$run/report-$label/report.json" ]; then
        python -m scripts.evaluate "$recipe" "name=$run" "$corpus" "evaluate.label=$label" "$@" "${overrides[@]}"
    fi
}

# fit RUN RECIPE [KEY=VALUE ...]: trained, and evaluated as a chain, greedy
fit() {
    local run=$1 recipe=$2 script=train_eagle.py
    shift 2
    case $recipe in *medusa*) script=train_medusa.py ;; esac
    echo "== $run"
    if [ ! -e "runs/$run/report-chain/report.json" ]; then
        "${launch[@]}" "$script" "$recipe" "name=$run" "$corpus" "$@" "${overrides[@]}"
    fi
    evaluate "$recipe" "$run" chain "$@"
}

# kind RUN RECIPE [KEY=VALUE ...]: trained, and evaluated in all four ways to decode
kind() {
    local run=$1 recipe=$2
    fit "$@"
    shift 2
    local tree=(evaluate.drafter.shape.kind=dynamic evaluate.drafter.shape.nodes=16 evaluate.drafter.shape.beam=4)
    evaluate "$recipe" "$run" tree "${tree[@]}" "$@"
    evaluate "$recipe" "$run" chain-t1 evaluate.temperature=1.0 "$@"
    evaluate "$recipe" "$run" tree-t1 evaluate.temperature=1.0 "${tree[@]}" "$@"
    python -m scripts.compare runs/table-*/report-* --markdown docs/results.md
}

# option NAME [KEY=VALUE ...]: a third of the passes for all alike, chain, greedy
option() {
    local run=option-$1
    shift
    fit "$run" "$base" train.epochs=2 "$@"
    python -m scripts.compare runs/option-*/report-* --markdown docs/options.md
}

python -m scripts.prepare "$base" "${overrides[@]}"
if [ "$part" = kinds ]; then
    kind table-eagle3 "$base"
    kind table-medusa recipes/smollm2-135m-medusa.yaml
    kind table-eagle1 recipes/smollm2-135m-eagle1.yaml
    kind table-eagle3-classic "$base" head.variant=classic
    kind table-peagle recipes/smollm2-135m-peagle.yaml
    kind table-medusa2 recipes/smollm2-135m-medusa2.yaml
    kind table-hass recipes/smollm2-135m-eagle1.yaml objective.eagle.align_passes=3 objective.eagle.top_weight=1.0
else
    option base
    option lk objective.loss=lk
    option tv objective.loss=tv
    option hard objective.labels=hard
    option dpace objective.depth_weights=dpace
    option equal objective.depth_decay=1.0
    option drop objective.oov_policy=drop
    option global objective.loss_norm=global_valid
    option layers2 head.layers=2
    option frozen-lm-head head.train_lm_head=false
    option paper-init head.init=paper
    option taps-low head.taps=[2,8,15]
    option taps-high head.taps=[15,22,29]
fi
