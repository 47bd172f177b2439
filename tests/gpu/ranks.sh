#!/usr/bin/env bash
# ranks.sh FOLDER: on a machine with four GPUs, a hang and an imbalance explained by `gputrace ranks`, and the hang also by PyTorch's
# flight recorder. FOLDER has `gputrace` and `libgputrace.so`. Prints PASS or FAIL a line; about two minutes.
set -u
here=$(cd "$(dirname "$0")" && pwd)
gputrace=$(cd "$1" && pwd)/gputrace
out=${OUT:-$(mktemp -d)}
gpus=$(nvidia-smi -L | wc -l)
ranks=$((gpus < 4 ? gpus : 4))
failed=0
export NCCL_NVLS_ENABLE=0

check() { # NAME COMMAND...: whether the command succeeds
  local name=$1; shift
  if "$@"; then echo "PASS $name"; else echo "FAIL $name"; failed=1; fi
}

line() { grep -n "# $2" "$here/$1" | cut -d: -f1; }

# torchrun is told to end by SIGKILL to all of its workers: nothing of theirs, and no watchdog, gets to say anything.
hang() { # FOLDER [COMMAND...]: runs hang.py under COMMAND and kills its ranks
  local folder=$1; shift
  mkdir -p "$folder"
  MASTER_PORT=$((20000 + RANDOM % 20000))
  local pids=()
  for rank in $(seq 0 $((ranks - 1))); do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$MASTER_PORT \
      "$@" python3 "$here/hang.py" > "$folder/rank$rank.log" 2>&1 &
    pids+=($!)
  done
  sleep "${HANG_SECONDS:-40}"
  if [ -n "${DUMP:-}" ]; then for rank in $(seq 0 $((ranks - 1))); do echo 1 > "$folder/pipe_$rank.pipe" & done; sleep 5; fi
  kill -KILL "${pids[@]}" 2> "$folder/kill.log"
  wait "${pids[@]}" 2> /dev/null
  sleep 2
}

echo "== hang, recorded: $ranks ranks, killed with SIGKILL"
hang "$out/hang" "$gputrace" record -f -o "$out/hang/%h.r%r.%p.gtr" --
"$gputrace" ranks "$out/hang" | head -80
"$gputrace" ranks --json "$out/hang" > "$out/hang.json"
cat > "$out/check.py" <<'PYTHON'
import json, sys
what, path, *rest = sys.argv[1:]
job = json.load(open(path))["jobs"][0]
if what == "hang":
    line = int(rest[0])
    first = job["findings"][0]
    print("  first finding:", first["kind"], first["ranks"], first["communicator"], first["sequence"], first["text"])
    ok = first["kind"] == "missing_call" and first["ranks"] == [2] and first["others"]["place"]["line"] == line and first["sequence"] == 37
elif what == "extra":
    line = rest[0]
    uneven = [row for row in job["memory"]["uneven"] if row["rank"] == 0]
    print("  median", job["memory"]["median_bytes"], "rank 0 beyond:", job["memory"]["ranks"][0]["beyond_median_bytes"])
    for row in uneven[:3]:
        print("  ", row)
    ok = bool(uneven) and f"imbalance.py:{line})" in uneven[0]["place"]
elif what == "strangers":
    line = int(rest[0])
    for row in job["strangers"]:
        print("  rank", row["rank"], "pid", row["pid"], "on", row["uuid"], "of ranks", row["owners"], row["peak_bytes"], row["context_bytes"], row["place"] and row["place"]["text"])
    found = {row["rank"] for row in job["strangers"] if row["owners"] == [0] and row["place"] and row["place"]["line"] == line}
    ok = found == set(range(1, int(rest[1])))
elif what == "consistent":
    print("  verdict:", job["verdict"], [finding["text"] for finding in job["findings"]])
    ok = job["verdict"] == "consistent"
sys.exit(0 if ok else 1)
PYTHON
check "the rank, the call number and the line that was skipped are named" python3 "$out/check.py" hang "$out/hang.json" "$(line hang.py skipped)"

echo "== the same with PyTorch's flight recorder"
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_FR_DUMP_TEMP_FILE=$out/flight/dump_ TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$out/flight/dump_
export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=$out/flight/pipe_
mkdir -p "$out/flight"
DUMP=1 HANG_SECONDS=30 hang "$out/flight"
ls "$out/flight" | tr '\n' ' '; echo
for command in "torchfrtrace" "python3 -m torch.distributed.flight_recorder.fr_trace"; do
  $command --prefix dump_ "$out/flight" > "$out/flight.txt" 2>&1 && break
done
tail -25 "$out/flight.txt" | cut -c1-200
unset TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_DEBUG_INFO_PIPE_FILE

echo "== imbalance"
mkdir -p "$out/imbalance"
"$gputrace" record -f -o "$out/imbalance/%h.r%r.%p.gtr" -- \
  torchrun --standalone --nproc-per-node "$ranks" "$here/imbalance.py" > "$out/imbalance.log" 2>&1
tail -4 "$out/imbalance.log"
"$gputrace" ranks "$out/imbalance" | head -70
"$gputrace" ranks --json "$out/imbalance" > "$out/imbalance.json"
check "rank 0's extra copy is named with its line" python3 "$out/check.py" extra "$out/imbalance.json" "$(line imbalance.py 'extra copy')"
check "the processes that touched cuda:0 are named with their line" \
  python3 "$out/check.py" strangers "$out/imbalance.json" "$(line imbalance.py 'touched by every rank')" "$ranks"
check "its communication is consistent" python3 "$out/check.py" consistent "$out/imbalance.json"
"$gputrace" report --all "$out"/imbalance/*.r0.*.gtr | sed -n '/Memory of NCCL/,/^$/p' | cut -c1-200
exit $failed
