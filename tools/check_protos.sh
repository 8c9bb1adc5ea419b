#!/usr/bin/env bash
# The contract: lint, compatibility with the last release (else a tag, else main), and generated code that is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:?usage: check_protos.sh BIN-OF-THE-GENERATOR}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$bin/buf" lint protos

reference=""
released=$(sed -n 's/^commit = "\(.*\)"/\1/p' tests/upgrade/releases.toml | head -n 1)
for each in "$released" "$(git describe --tags --abbrev=0 2>/dev/null || true)" origin/main main; do
    if [ -n "$each" ] && git cat-file -e "$each:protos" 2>/dev/null; then reference=$each; break; fi
done
if [ -n "$reference" ]; then
    mkdir "$scratch/before"
    git archive "$reference" protos | tar -x -C "$scratch/before"
    "$bin/buf" breaking protos --against "$scratch/before/protos"
else
    echo "no tag and no main branch to compare the protos with"
fi

protos/generate.sh "$bin/python" "$scratch/generated"
if ! diff -r -q -x __pycache__ headrace/api "$scratch/generated/headrace/api"; then
    echo "headrace/api is not what protos/ generates: run make protos and commit the result" >&2
    exit 1
fi
