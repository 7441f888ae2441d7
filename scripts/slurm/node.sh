#!/usr/bin/env bash
# On a node: run a command, and pass SLURM's signal to those who can act on it. step.sh calls it, by srun.
#   node.sh ranks TORCHRUN ...    to the ranks, which save and stop (Megatron's --exit-signal-handler)
#   node.sh itself COMMAND ...    to the command, which ends
# SIGUSR1 (sbatch --signal) and SIGTERM (preemption, the time limit, scancel) reach this shell alone, or with it all that
# it started: that is the cluster's proctrack plugin. torchrun would answer with SIGTERM to its ranks and, 30 s later,
# SIGKILL, whether they have saved or not. So torchrun ignores both signals, and its ranks do until Megatron has set its
# handler of SIGTERM; the word is repeated until they are gone, since it may come before that.
# shellcheck disable=SC2317  # a trap calls the functions
set -uo pipefail
whom=$1
shift
export PET_NODE_RANK=$SLURM_NODEID # torchrun's --node-rank
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron's tensor and context parallelism need it
# Ranks of several nodes would write Triton's kernels over each other in a home folder that they share.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-$SLURM_JOB_ID}

children_of() { # neither pgrep nor /proc/PID/task/TID/children is everywhere
    local stat line fields
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue
        read -ra fields <<<"${line##*) }" # after the name: state, parent
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
trap early=yes USR1 TERM # until there is a command to stop
(
    [ "$whom" = itself ] || trap '' USR1 TERM
    exec "$@"
) &
command=$!
trap stop USR1 TERM
[ -z "$early" ] || stop
signalled=yes
while [ -n "$signalled" ]; do # a signal has ended the wait, and not the command
    signalled=
    wait "$command"
    status=$?
done
exit "$status"
