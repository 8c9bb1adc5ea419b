#!/usr/bin/env bash
# `run.sh BIN STEPS`: a few steps of every example, each a whole run; ends with the first that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1 steps=$2 name="example-$(date +%Y%m%d-%H%M%S)"
"$bin/python" examples/tools/calculator.py
short=(--num-rollout "$steps" --skip-eval-before-train)
echo "── examples/quickstart"
"$bin/headrace" train examples/quickstart/job.toml --run-name "$name-quickstart" "${short[@]}"
echo "── examples/agents"
"$bin/headrace" train examples/quickstart/job.toml --run-name "$name-agents" "${short[@]}" \
    --agent-function-path examples/agents/asks_again.py:run --max-turns 3
echo "── examples/tools"
"$bin/headrace" train examples/tools/job.toml --run-name "$name-tools" "${short[@]}"
for example in quickstart agents tools; do
    "$bin/headrace" audit "runs/$name-$example"
done
