#!/usr/bin/env bash
# `install.sh PIP-COMMAND… -r FILE…` runs it and counts packages in one line, instead of pip's three lines for each.
# When pip fails, the end of what it said is shown.
set -uo pipefail
files=() previous=
for word in "$@"; do [ "$previous" = -r ] && files+=("$word"); previous=$word; done
total=$(cat "${files[@]}" | grep -c '^[A-Za-z0-9]')
log=$(mktemp)
trap 'rm -f "$log"' EXIT

show() { # a terminal shows every package in one line, a log a line now and then
    if [ -t 1 ]; then printf '\r\033[K   %s' "$1"; elif [ $((count % 25)) = 0 ]; then printf '   %s\n' "$1"; fi
}

count=0
"$@" 2>&1 | tee "$log" | while read -r word name _; do
    case $word in
    Collecting | Processing) count=$((count + 1)) && show "$count of $total: ${name##*/}" ;;
    Installing) [ "$name" = collected ] && count=0 && show "installing" ;;
    Successfully) count=0 && show "installed" ;;
    esac
done
status=${PIPESTATUS[0]}
[ -t 1 ] && echo
[ "$status" = 0 ] || tail -n 20 "$log"
exit "$status"
