#!/usr/bin/env bash
# `run.sh BIN STEPS`: a few steps of every template, each a whole run; ends with the first that fails.
set -euo pipefail
bin=$(realpath "$1") steps=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for template in sums math tools agent sft; do  # `judge` needs a server that grades
    echo "── $template"
    "$bin/headrace" init "$folder/$template" --template "$template"
    cd "$folder/$template"
    "$bin/headrace" train --num-rollout "$steps" --skip-eval-before-train
    "$bin/headrace" audit
done
