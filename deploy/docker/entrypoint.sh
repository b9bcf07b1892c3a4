#!/bin/sh
# Runs one module of the image. A service listens on the container's own address, which is also the one that it tells to peers.
set -eu
HEADRACE_HOST=${HEADRACE_HOST:-$(hostname -i | cut -d' ' -f1)}
export HEADRACE_HOST
exec /opt/headrace/bin/python -m "$@"
