#!/usr/bin/env bash
# apt.sh ARGUMENTS: `apt-get ARGUMENTS` as root, which waits where another program holds one of apt's locks, and says so once. apt's own
# DPkg::Lock::Timeout covers dpkg's locks, and not that of the lists. Gives up after APT_LOCK_SECONDS, ten minutes unless it is set.
set -euo pipefail
root=()
[ "$(id -u)" = 0 ] || root=(sudo)
# Where nobody can be asked for a password, none is asked for.
[ "$(id -u)" = 0 ] || [ -t 0 ] || root=(sudo -n)
until=$((SECONDS + ${APT_LOCK_SECONDS:-600}))
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
is_said=""
while true; do
  status=0
  "${root[@]}" env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=0 "$@" 2>"$errors" || status=$?
  # A lock that is held is one that apt "could not get"; one that may not be taken at all it "could not open".
  if [ "$status" = 0 ] || ! grep -q '^E: Could not get lock' "$errors" || [ "$SECONDS" -ge "$until" ]; then
    break
  fi
  [ -n "$is_said" ] || sed -n 's/^E: Could not get lock/apt.sh: waiting for/p' "$errors" | head -n 1 >&2
  is_said=1
  sleep 1
done
cat "$errors" >&2
exit "$status"
