#!/bin/sh
# `size.sh ENGINE IMAGE`: prints how large an image is, and how much of that is above its base.
set -eu
engine=$1 image=$2
size() { $engine image inspect --format '{{.Size}}' "$1"; }
base=$($engine image inspect --format '{{index .Config.Labels "org.opencontainers.image.base.name"}}' "$image")
whole=$(size "$image") below=$(size "$base")
echo "$image: $((whole / 1000000)) MB, $(((whole - below) / 1000000)) MB of them above $base"
