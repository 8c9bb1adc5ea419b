#!/usr/bin/env bash
# `run.sh BIN MODEL`: trains, then shows where everything is and lets the model speak.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$1 model=$2
name="quickstart-$(date +%Y%m%d-%H%M%S)"
run="runs/$name"
"$bin/headrace" train examples/quickstart/job.toml --run-name "$name" --save-hf "$run/model" "${@:3}"
echo
echo "questions that were not in the training data, before and after:"
"$bin/python" examples/quickstart/talk.py "$model" "$run/model" models/quickstart/eval.jsonl 2>/dev/null
echo
echo "picture   $run/curves.png"
echo "model     $run/model (Hugging Face)"
echo "figures   $run/metrics.jsonl"
