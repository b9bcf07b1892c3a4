#!/bin/sh
# Writes the server's configuration with the credentials of the environment, so that they appear in no process list, and runs it.
set -eu
: "${HEADRACE_NATS_USER:?is not set}" "${HEADRACE_NATS_PASSWORD:?is not set}"
case "$HEADRACE_NATS_USER$HEADRACE_NATS_PASSWORD" in
*[\"\\]*) echo "nats-entrypoint: user and password may not hold a quote or a backslash" >&2 && exit 1 ;;
esac
umask 077
cat >/tmp/nats.conf <<CONF
server_name: headrace
listen: "0.0.0.0:4222"
http: "127.0.0.1:8222"
authorization { user: "$HEADRACE_NATS_USER", password: "$HEADRACE_NATS_PASSWORD" }
CONF
exec nats-server --config /tmp/nats.conf "$@"
