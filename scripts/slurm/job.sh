# shellcheck shell=bash
# Shared by all jobs: each *.sbatch sources this file from the checkout it was submitted in. See docs/guides/cluster.md.
#   open_run RECIPE   read the recipe; create the run's folder with a copy of the code; set the rendezvous address
#   step HOW PROGRAM [arguments]    run a Python program with srun (step.sh); append its output to the run's log.txt
# A job stopped by SLURM's signal requeues itself when it ends.

die() {
    echo "$SLURM_JOB_NAME: error: $*" >&2
    exit 2
}

open_run() {
    find_recipe "${1:-}"
    RUN=$(realpath -m "${RUN_DIR:-$SLURM_SUBMIT_DIR/runs/$(basename "$RECIPE" .sh)}")
    choose_value
    JOB=$RUN/jobs/$SLURM_JOB_ID
    CODE=$JOB/code
    START=$JOB/start-${SLURM_RESTART_COUNT:-0}
    mkdir -p "$START"
    copy_code
    # shellcheck source=/dev/null
    source "$JOB/recipe.sh"
    meet
    export RUN CODE START
    trap requeue_if_stopped EXIT
    echo "run: $RUN; job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
}

find_recipe() { # accepts the name of a recipe, or a file
    RECIPE=${1:-}
    [ -f "$RECIPE" ] || RECIPE=$SLURM_SUBMIT_DIR/scripts/slurm/recipes/$1.sh
    [ -f "$RECIPE" ] || die "there is no recipe '${1:-}'; give a file or one of" \
        "$(basename -s .sh "$SLURM_SUBMIT_DIR"/scripts/slurm/recipes/*.sh | paste -sd ' ')."
}

choose_value() { # select from SWEEP="VARIABLE=VALUE VALUE ..." by job array index
    local variable=${SWEEP:-} index=${SLURM_ARRAY_TASK_ID:-} values
    variable=${variable%%=*}
    [ -n "$variable$index" ] || return 0
    [ -n "$index" ] || die "SWEEP is '$SWEEP', and the job is not an array; add --array=0-N to sbatch."
    [ -n "$variable" ] || die "the job is an array without SWEEP; give SWEEP='VARIABLE=VALUE VALUE ...'."
    read -ra values <<<"${SWEEP#*=}"
    [ "$index" -lt "${#values[@]}" ] ||
        die "--array has the index $index, and SWEEP has ${#values[@]} values; they count from 0."
    grep -q "\${$variable:=" "$RECIPE" || die "SWEEP names $variable, which $RECIPE does not read."
    export "$variable=${values[index]}"
    RUN=$RUN/$variable-${values[index]//\//_}
}

copy_code() { # once per job: after a requeue the job continues with the same code and recipe
    [ ! -d "$CODE" ] || return 0
    rm -rf "$CODE.partial"
    mkdir "$CODE.partial"
    tar -C "$SLURM_SUBMIT_DIR" --exclude=__pycache__ -cf - pretrain_gpt.py generate_gpt.py megatron_mtp tools scripts |
        tar -C "$CODE.partial" -xf -
    cp "$RECIPE" "$JOB/recipe.sh"
    (cd "$SLURM_SUBMIT_DIR" && git rev-parse HEAD && git status --short) >"$JOB/revision" 2>/dev/null ||
        echo "no git revision" >"$JOB/revision"
    mv "$CODE.partial" "$CODE"
}

address_of() { # the node's name, or SLURM's address for it if the name does not resolve
    local known=
    getent hosts "$1" >/dev/null || known=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    echo "${known:-$1}"
}

meet() { # set torchrun's rendezvous address, the ranks per node, and the Python interpreter
    local hosts
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${MASTER_ADDR:-$(address_of "${hosts[0]}")}
    export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # below the ephemeral ports
    export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
    export PYTHONPATH=$CODE${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # import the copy, not the current folder
    if [ -n "${CONTAINER:-}" ]; then
        export STEP_PYTHON=python
    else
        export STEP_PYTHON=${VENV:-$SLURM_SUBMIT_DIR/.venv}/bin/python
        [ -x "$STEP_PYTHON" ] || die "there is no $STEP_PYTHON; run scripts/setup.sh, or give VENV or CONTAINER."
    fi
}

step() {
    bash "$CODE/scripts/slurm/step.sh" "$@" 2>&1 | tee -a "$RUN/log.txt"
}

requeue_if_stopped() { # unless scancel or SLURM's own requeue ended the job; scontrol requeue also kills this script
    if [ -e "$START/stopped" ] && [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
        echo "stopped by SLURM's signal: job $SLURM_JOB_ID goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}
