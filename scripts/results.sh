#!/usr/bin/env bash
# Everything behind docs/results.md and docs/options.md: trains each kind of head and each option on one corpus, evaluates, tabulates.
#   bash scripts/results.sh [KEY=VALUE ...]    overrides go to every command
# Hours on 2 CPU cores. Killed and started again, it continues: what has a report is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
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

# modes RUN RECIPE [KEY=VALUE ...]: the other three ways to decode
modes() {
    local run=$1 recipe=$2
    shift 2
    evaluate "$recipe" "$run" tree evaluate.drafter.shape.kind=dynamic evaluate.drafter.shape.nodes=16 evaluate.drafter.shape.beam=4 "$@"
    evaluate "$recipe" "$run" chain-t1 evaluate.temperature=1.0 "$@"
    evaluate "$recipe" "$run" tree-t1 evaluate.temperature=1.0 \
        evaluate.drafter.shape.kind=dynamic evaluate.drafter.shape.nodes=16 evaluate.drafter.shape.beam=4 "$@"
}

python -m scripts.prepare "$base" "${overrides[@]}"

kind() { fit "$@"; modes "$@"; }
kind table-eagle3 "$base"
kind table-eagle3-classic "$base" head.variant=classic
kind table-eagle1 recipes/smollm2-135m-eagle1.yaml
kind table-hass recipes/smollm2-135m-eagle1.yaml objective.eagle.align_passes=3 objective.eagle.top_weight=1.0
kind table-medusa recipes/smollm2-135m-medusa.yaml
kind table-medusa2 recipes/smollm2-135m-medusa2.yaml
kind table-peagle recipes/smollm2-135m-peagle.yaml
python -m scripts.compare runs/table-*/report-* --markdown docs/results.md

# Half of the passes, for all alike: what an option does shows by then, and there are many of them.
option() {
    local run=option-$1
    shift
    fit "$run" "$base" train.epochs=3 "$@"
    evaluate "$base" "$run" chain-t1 train.epochs=3 evaluate.temperature=1.0 "$@"
}
option base
option lk objective.loss=lk
option tv objective.loss=tv
option hard objective.labels=hard
option dpace objective.depth_weights=dpace
option equal objective.depth_decay=1.0
option drop objective.oov_policy=drop
option global objective.loss_norm=global_valid
option layers2 head.layers=2
option taps-low head.taps=[2,8,15]
option taps-high head.taps=[15,22,29]
option frozen-lm-head head.train_lm_head=false
option paper-init head.init=paper
python -m scripts.compare runs/option-*/report-* --markdown docs/options.md
