#!/usr/bin/env bash
# deploy/ray/submit.sh FOLDER job.toml --tls-dir FOLDER [flags of headrace train]: a run as a job of a Ray cluster.
#
#   export RAY_API_SERVER_ADDRESS=http://HEAD:8265 RAY_AUTH_MODE=token RAY_AUTH_TOKEN=…    # the cluster's own token
#   deploy/ray/submit.sh mine job.toml --tls-dir /shared/tls --actor-num-nodes 2 --actor-num-gpus-per-node 8
#
# FOLDER has the job and your functions, and is copied to the head, where headrace and the services without an address
# run; HEAD is the address at which all machines reach it (HEADRACE_SERVICE_HOST names another). Ranks and engines are
# placed on all machines. The model, the prompts, the run's folder (--run-dir) and --tls-dir are absolute paths that all
# machines see. `ray job stop JOB` ends all processes of the run at once; the same command continues it from its last
# checkpoint (--save-interval).
#
# The cluster: `ray start --head --dashboard-host=HEAD` on the first machine and `ray start --address=HEAD:6379` on the
# others, each with headrace-services and 'headrace[ray]'; here and on the head also 'ray[default]', which has the jobs. Everyone who reaches a Ray
# cluster runs programs on it: give all machines RAY_AUTH_MODE=token and a RAY_AUTH_TOKEN.
set -euo pipefail

folder=$1 job=$2
shift 2
head=${RAY_API_SERVER_ADDRESS#*://}

# A flag that is given again counts: "$@" may have the engines elsewhere.
exec ray job submit --working-dir "$folder" -- \
    headrace train "$job" --placement ray --rollout-placement ray \
    --service-host "${HEADRACE_SERVICE_HOST:-${head%:*}}" "$@"
