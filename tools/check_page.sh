#!/usr/bin/env bash
# The page of `headrace view`: its types are right, and headrace/view/static is what web/ builds.
set -euo pipefail
cd "$(dirname "$0")/../web"
if ! command -v npm >/dev/null; then
    echo "skipped: the page was not rebuilt, because Node.js is not installed"
    exit 0
fi
[ -d node_modules/esbuild ] || npm ci --no-audit --no-fund --loglevel=error
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

npm run --silent check
node build.mjs "$scratch"
if ! diff -r -q ../headrace/view/static "$scratch"; then
    echo "headrace/view/static is not what web/ builds: run npm run build in web/ and commit the result" >&2
    exit 1
fi
