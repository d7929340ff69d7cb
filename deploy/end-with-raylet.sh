#!/usr/bin/env bash
# Beside a node's raylet: when that is gone, for whatever reason, ends the log monitor that was started with it. Ray
# leaves it running, and `ray down` does not come to machines other than the head.
set -euo pipefail

raylet=$(pgrep -n -x raylet)
monitor=$(pgrep -n -f '/ray/_private/log_monitor\.py')
while kill -0 "$raylet" 2> /dev/null; do
    sleep 2
done
kill "$monitor"
