#!/usr/bin/env bash
# Set-up and the main job: train an EAGLE-3 head for a small real target and measure its acceptance length.
#   bash scripts/quickstart.sh                                   the quick recipe
#   bash scripts/quickstart.sh recipes/smollm2-135m-eagle3.yaml  another one; key=value overrides may follow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The empty argument matters: without one, a sourced file sees the caller's, which name a recipe here.
source scripts/setup.sh ""

recipe=("${@:-recipes/smollm2-135m-eagle3-quick.yaml}")
started=$SECONDS
step() {
    echo
    echo "+ $*"
    "$@"
}
step python -m scripts.prepare "${recipe[@]}"
step accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no train_eagle.py "${recipe[@]}"
step python -m scripts.evaluate "${recipe[@]}"
echo
echo "the pipeline took $(( (SECONDS - started + 59) / 60 )) minutes after installation"
