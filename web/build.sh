#!/usr/bin/env bash
# `build.sh FOLDER`: checks the types and writes the page of `headrace view` into the folder.
set -euo pipefail
target=$(realpath -m "${1:?usage: build.sh FOLDER}")
cd "$(dirname "$0")"
[ -d node_modules/esbuild ] || npm ci --no-audit --no-fund --loglevel=error
node_modules/.bin/tsc
mkdir -p "$target"
cp index.html "$target/index.html"
node_modules/.bin/esbuild src/main.ts --bundle --minify --target=es2022 --charset=utf8 --format=iife --log-level=warning --outfile="$target/page.js"
node_modules/.bin/esbuild page.css --minify --log-level=warning --outfile="$target/page.css"
