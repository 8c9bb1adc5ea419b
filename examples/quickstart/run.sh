#!/usr/bin/env bash
# `run.sh BIN MODEL`: trains, or continues an interrupted run; then shows where everything is and asks the model.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$1 model=$2
run="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
last=$(find runs -maxdepth 1 -name 'quickstart-*' 2>/dev/null | sort | tail -n 1) || true
# The model is written at the end. `status` of a running run exits with 0.
if [ -d "${last:-none}/checkpoints" ] && [ ! -e "$last/model" ] && ! "$bin/headrace" status "$last" >/dev/null 2>&1; then
    run=$last
    echo "$run was interrupted and goes on; delete it to begin anew"
fi
"$bin/headrace" train examples/quickstart/job.toml --run-name "${run#runs/}" --save-hf "$run/model" "${@:3}"
echo
echo "questions that were not in the training data, before and after:"
"$bin/python" examples/quickstart/talk.py "$model" "$run/model" models/quickstart/eval.jsonl 2>/dev/null
echo
echo "picture   $run/curves.png"
echo "model     $run/model (Hugging Face)"
echo "figures   $run/metrics.jsonl"
