#!/usr/bin/env bash
# Run one step of a job: a Python program under srun, in the container CONTAINER if set. job.sh exports its variables.
#   step.sh train PROGRAM [arguments]    ranks on all nodes under torchrun; they save and stop at SLURM's signal
#   step.sh ranks PROGRAM [arguments]    ranks on all nodes under torchrun
#   step.sh once PROGRAM [arguments]     one process, on the first node
# Exit status 75: stopped by SLURM's signal; the next start of the job continues.
set -euo pipefail
how=$1
shift

torchrun=(
    "$STEP_PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS_PER_NODE"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
)
case $how in
    train) nodes=$SLURM_JOB_NUM_NODES command=(ranks "${torchrun[@]}" --signals-to-handle SIGINT "$@") ;; # see node.sh
    ranks) nodes=$SLURM_JOB_NUM_NODES command=(itself "${torchrun[@]}" "$@") ;;
    once) nodes=1 command=(itself "$STEP_PYTHON" "$@") ;;
esac
container=()
if [ -n "${CONTAINER:-}" ]; then
    container=(
        --container-image "$CONTAINER" --container-workdir "$PWD"
        --container-mounts "$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR,$RUN:$RUN${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
    )
fi
launch=(
    srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1 --chdir "$PWD" "${container[@]}"
    bash "$CODE/scripts/slurm/node.sh" "${command[@]}"
)

printf '%q ' "${launch[@]}" >>"$START/commands"
echo >>"$START/commands"
status=0
"${launch[@]}" || status=$?
[ ! -e "$START/stopped" ] || exit 75
exit "$status"
