# gateway: HTTP in, SSE out. No torch.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN python3 -m venv /opt/headrace
WORKDIR /src
COPY libs/bus libs/bus
COPY libs/kv libs/kv
COPY libs/transfer libs/transfer
COPY libs/recipe libs/recipe
COPY services/gateway services/gateway
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/headrace/bin/pip install ./libs/bus ./libs/kv ./libs/transfer ./libs/recipe ./services/gateway

FROM ${BASE}
COPY --from=build /opt/headrace /opt/headrace
COPY --chmod=755 deploy/docker/entrypoint.sh deploy/docker/healthcheck.sh /usr/local/bin/
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin headrace
USER 10001
ENTRYPOINT ["/usr/local/bin/entrypoint.sh"]
CMD ["headrace.gateway"]
