#!/usr/bin/env bash
# The page of `headrace view` is what web/ builds; the types of its source are checked.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v npm >/dev/null; then echo "Node.js is not installed: the page is not built again"; exit 0; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
web/build.sh "$scratch"
if ! diff -r -q headrace/view/static "$scratch"; then
    echo "headrace/view/static is not what web/ builds: run make page and commit the result" >&2
    exit 1
fi
