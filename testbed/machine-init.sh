#!/bin/bash
# PID 1 of one machine, inside its own mount, PID, network and UTS namespaces. SIGKILL of this process is a power loss:
# the kernel ends every process of the machine, and its mounts and network vanish with it.
# usage: machine-init.sh NAME ADDRESS SCRIPT   (SCRIPT starts the daemons; it was written by testbed.machine)
set -eu
export GOGC=300  # the daemons are Go programs: less time for garbage, for some hundred MiB
name=$1 address=$2 script=$3
hostname "$name"
mount --make-rshared /                      # a peer group of its own; unshare has already cut it from the host
mount -t tmpfs -o mode=755 tmpfs /run       # as on a real machine, /run does not survive a reboot
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up
ip addr add "$address/24" dev eth0
ip link set eth0 up
# keep NAME COMMAND...: run a daemon for ever, with its own log; not while the file NAME.hold lies beside its log
keep() {
  local label=$1; shift
  ( while :; do
      while [ -e "$LOGS/$label.hold" ]; do sleep 0.1; done
      "$@" >>"$LOGS/$label.log" 2>&1 || echo "$label ended with $?" >>"$LOGS/$label.log"
      sleep 0.5
    done ) &
}
source "$script"
while :; do wait || true; sleep 3600 & done
