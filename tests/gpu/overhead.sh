#!/usr/bin/env bash
# overhead.sh GPUTRACE SCRIPT: SCRIPT (`SCRIPT MODE` prints nanoseconds per torch.empty and milliseconds per training step) alone
# and recorded, in turn, and under PyTorch's own recorders, on one machine.
gputrace=$1; script=$2; out=$(mktemp -d)
for round in 1 2 3; do
  echo "alone:            $(python3 "$script" plain)"
  for stacks in none python all; do
    echo "stacks $stacks: $(printf '%*s' $((9 - ${#stacks})) '') $("$gputrace" record -f -o "$out/%p.gtr" --stacks $stacks -- python3 "$script" plain 2>&1)"
  done
done
for mode in hist_none hist_py hist_all; do echo "PyTorch $mode: $(python3 "$script" $mode)"; done
rm -r "$out"
