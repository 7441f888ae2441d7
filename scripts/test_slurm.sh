#!/usr/bin/env bash
# Start a SLURM cluster of two nodes on this machine and test the jobs of scripts/slurm: tests/functional/test_slurm.py.
#   scripts/test_slurm.sh [pytest arguments]
# Needs the Debian packages slurm-wlm and munge, and installs them if run as root. If that fails, it prints a message
# and exits with status 77, which test runners report as skipped. All daemons stop with the script; nothing is left behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

skip() { echo "test_slurm.sh: skipped, since $1"; exit 77; }
missing() {
    local command
    for command in munged slurmctld slurmd sbatch; do command -v "$command" >/dev/null || return 0; done
    return 1
}
PATH=$PATH:/usr/sbin:/sbin
if missing && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes slurm-wlm munge; } >/dev/null 2>&1 || true
fi
! missing || skip "there is no munged, slurmctld, slurmd or sbatch; install slurm-wlm and munge (root gets them by apt)"
host=$(hostname -s)
getent hosts "$host" >/dev/null || skip "this machine's name, $host, has no address"

work=$(mktemp -d)
chmod 711 "$work" # required by munged
export SLURM_CONF=$work/slurm.conf
port=$((21000 + $$ % 1000 * 4))
nodes=("$host" "$host-2")

stop() {
    local pid
    scancel --quiet --user "$(id -un)" 2>/dev/null || true
    for _ in {1..60}; do squeue --noheader 2>/dev/null | grep -q . || break; sleep 0.5; done
    for pid in "$work"/slurmctld.pid "$work"/slurmd.*.pid "$work"/munged.pid; do
        [ ! -s "$pid" ] || kill "$(cat "$pid")" 2>/dev/null || true
    done
    for _ in {1..60}; do pgrep --full "$work" >/dev/null || break; sleep 0.5; done
    rm -rf "$work"
}
trap stop EXIT
trap "exit 143" HUP INT TERM

head --bytes 1024 /dev/urandom >"$work/munge.key"
chmod 600 "$work/munge.key"
munged --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munged.pid" \
    --log-file="$work/munged.log" --seed-file="$work/munge.seed" --num-threads=1

cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
StateSaveLocation=$work/state
SlurmctldPidFile=$work/slurmctld.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdSpoolDir=$work/spool.%n
SlurmdPidFile=$work/slurmd.%n.pid
SlurmdLogFile=$work/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MailProg=/bin/true
KillWait=10
MinJobAge=7200
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=${nodes[0]} NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=1
NodeName=${nodes[1]} NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=600
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
CONF
mkdir "$work/state"
slurmctld -f "$SLURM_CONF"
for node in "${nodes[@]}"; do
    mkdir "$work/spool.$node"
    slurmd -f "$SLURM_CONF" -N "$node"
done
for _ in {1..60}; do
    [ "$(sinfo --noheader --states=idle --Node --partition=low 2>/dev/null | wc -l)" != 2 ] || break
    sleep 0.5
done
sinfo --Node --partition=low

.venv/bin/python -m pytest -n 0 tests/functional/test_slurm.py "$@" ||
    { tail --quiet -n 20 "$work"/*.log >&2; exit 1; }
