#!/usr/bin/env bash
# slurm.sh FOLDER COMMAND...: runs a command beside a Slurm of this machine alone: munged, slurmctld and slurmd as packages have them,
# with all they write in FOLDER. Needs root, as slurmd does, and Debian's slurmctld, slurmd, slurm-client and munge.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
for program in munged slurmctld slurmd sbatch; do
  command -v $program >/dev/null || { echo "slurm.sh: $program is not here: apt install slurmctld slurmd slurm-client munge" >&2; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "slurm.sh: slurmd runs as root" >&2; exit 77; }
host=$(hostname -s)
mkdir -p "$folder"/{state,spool,munge}
# munged wants folders that nobody else can write, all the way up: its own.
munge=$(mktemp -d /run/gputrace-munge.XXXXXX)
chmod 711 "$munge"
head -c 1024 /dev/urandom >"$munge/key"
chmod 400 "$munge/key"
cat >"$folder/slurm.conf" <<END
ClusterName=alone
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
AuthInfo=socket=$munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
MinJobAge=300
KillWait=1
MpiDefault=none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
# From 23.02 on it can do without control groups; before, it takes what there is.
case $(slurmd -V) in *" "2[0-2].*) plugin=${CGROUP_PLUGIN:-autodetect} ;; *) plugin=disabled ;; esac
echo "CgroupPlugin=$plugin" >"$folder/cgroup.conf"
export SLURM_CONF=$folder/slurm.conf
pids=()
cleanup() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$munge"
}
trap cleanup EXIT
munged --foreground --force --socket "$munge/socket" --key-file "$munge/key" --pid-file "$munge/pid" --seed-file "$munge/seed" \
  --log-file "$munge/log" 2>"$folder/munged.log" & pids+=($!)
until [ -S "$munge/socket" ]; do kill -0 "${pids[0]}" && sleep 0.1; done
slurmctld -D -c >/dev/null 2>&1 & pids+=($!)
slurmd -D >/dev/null 2>&1 & pids+=($!)
for _ in $(seq 300); do
  [ "$(sinfo -h -o %t 2>/dev/null)" = idle ] && break
  for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || { tail -n 5 "$folder"/slurm*.log >&2; exit 1; }; done
  sleep 0.1
done
[ "$(sinfo -h -o %t)" = idle ] || { sinfo >&2; tail -n 5 "$folder"/slurm*.log >&2; exit 1; }
"$@"
