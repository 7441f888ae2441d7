#!/usr/bin/env bash
# Run a command on a node and forward SLURM's signal to the right processes. step.sh starts it with srun.
#   node.sh ranks TORCHRUN ...    forward to the ranks, which save and stop (Megatron's --exit-signal-handler)
#   node.sh itself COMMAND ...    forward to the command, which ends
# SIGUSR1 (sbatch --signal) and SIGTERM (preemption, time limit, scancel) reach either this shell alone or its child
# processes too, depending on the cluster's proctrack plugin. torchrun would send SIGTERM to its ranks and, 30 s later,
# SIGKILL, whether they have saved or not. So torchrun and its ranks start with both signals ignored, and the ranks
# react to SIGTERM once Megatron has installed its handler. The signal may arrive before that, so it is sent again every
# 2 s until the command has ended.
# shellcheck disable=SC2317  # a trap calls the functions
set -uo pipefail
whom=$1
shift
export PET_NODE_RANK=$SLURM_NODEID # torchrun's --node-rank
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron requires it for TP and CP
# In a shared home folder, nodes would overwrite each other's Triton kernels.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$SLURM_JOB_ID}

children_of() { # pgrep and /proc/PID/task/TID/children do not exist on every system
    local stat line fields
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue
        read -ra fields <<<"${line##*) }" # the fields after the name: state, parent
        if [ "${fields[1]}" = "$1" ]; then
            line=${stat#/proc/}
            echo "${line%/stat}"
        fi
    done
}

forward() {
    if [ "$whom" = itself ]; then
        kill -TERM "$command" 2>/dev/null
    else
        children_of "$command" | xargs -r kill -TERM 2>/dev/null
    fi
}

stop() {
    signalled=yes
    touch "$START/stopped"
    while kill -0 "$command" 2>/dev/null; do
        forward
        sleep 2
    done >/dev/null 2>&1 &
}

early=
trap early=yes USR1 TERM # the command has not started yet
(
    [ "$whom" = itself ] || trap '' USR1 TERM
    exec "$@"
) &
command=$!
trap stop USR1 TERM
[ -z "$early" ] || stop
signalled=yes
while [ -n "$signalled" ]; do # `wait` also returns when a signal arrives
    signalled=
    wait "$command"
    status=$?
done
exit "$status"
