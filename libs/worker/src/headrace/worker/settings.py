"""Settings that prefill and decode share, and the launch flags of other systems that mean the same here.

Knows names, defaults, limits and what each flag becomes. A flag that can't apply is refused with the reason and what to use
instead.
"""

from __future__ import annotations

from typing import Annotated, Literal

from headrace.bus import Meta, Settings
from headrace.bus.cores import usable_cores


class WorkerSettings(Settings):
    """Sizes are per instance."""

    engine: Annotated[Literal["v41", "sim"], Meta(description="v41: computes, any family; sim: a timing model only")] = (
        "v41"
    )
    model: Annotated[str, Meta(description="folder of the checkpoint (engine v41)")] = ""
    num_blocks: Annotated[int, Meta(ge=0, description="KV blocks of 128 tokens; 0: 1024 (sim: 4096)")] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences at a time")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=0, description="rows of one step; a prompt's chunk is at most this long; 0: 2048 (sim: 16384)")
    ] = 0
    chunk_tokens: Annotated[
        list[int], Meta(description="upper bounds of a prompt's chunks in turn; none: half of a step's rows in prefill")
    ] = []
    max_model_len: Annotated[
        int, Meta(ge=0, description="prompt and output tokens of one request; 0: what the model takes")
    ] = 0
    numerics: Annotated[
        Literal["bounded", "exact"], Meta(description="exact: all layers on all rows; bounded: decoder layers on the last rows")
    ] = "bounded"
    batch_invariant: Annotated[bool, Meta(description="a row's result does not depend on what else is in the step")] = False
    kv_format: Annotated[Literal["quantized", "fp32"], Meta(description="how KV is stored; fp32 is for parity checks")] = (
        "quantized"
    )
    speculative: Annotated[
        Literal["off", "auto", "dspark"],
        Meta(description="dspark: the checkpoint's draft proposes tokens that decode verifies; auto: where it has a draft"),
    ] = "auto"
    acceptance: Annotated[
        Literal["exact", "standard"],
        Meta(description="exact: the same tokens as without drafts; standard: more drafts accepted, the same distribution"),
    ] = "exact"
    draft_budget: Annotated[
        int, Meta(ge=-1, description="drafts that a step verifies at most; -1: as many as pay by the measured step times")
    ] = -1
    draft_calibration: Annotated[
        str,
        Meta(description='file of temperatures of the draft, {"temperatures": [...]}; none: all 1; auto: the checkpoint\'s '
             "calibration.json, where it has one"),
    ] = "auto"  # fmt: skip
    confidence_head: Annotated[
        Literal["config", "raw", "normed"], Meta(description="the hidden vector it reads; config: what config.json says")
    ] = "config"
    rollback_gate: Annotated[
        float, Meta(ge=0, le=1, description="a request that loses more of its drafts pauses them, unless they pay; 1: never")
    ] = 0.3
    device: Annotated[str, Meta(description="cpu or cuda")] = "cpu"
    threads: Annotated[
        int, Meta(ge=0, description="compute threads; 0: half of the cores, for prefill and decode on one host")
    ] = 0
    async_scheduling: Annotated[bool, Meta(description="plan a step while the one before it runs")] = True
    snapshot_bytes: Annotated[int, Meta(ge=0, description="host memory for state snapshots; 0: none, hits replay")] = 256 << 20
    swap_bytes: Annotated[int, Meta(ge=0, description="host memory for sequences that were preempted")] = 1 << 30
    image_bytes: Annotated[
        int, Meta(ge=0, description="memory where embeddings of images land, of models that take images; 0: 64 MiB")
    ] = 0
    kvstore: Annotated[bool, Meta(description="look prefixes up in the kvstore and write blocks through to it")] = True
    kvstore_wait: Annotated[
        float, Meta(gt=0, description="seconds a request may wait for the kvstore before it is computed")
    ] = 0.25
    tcp_host: Annotated[str, Meta(description="address that peers connect to for tensors; none: --host, or this machine's")] = (
        ""
    )
    tcp_port: Annotated[int, Meta(ge=0, le=65535, description="port for tensors; 0: a free one")] = 0
    checksums: Annotated[bool, Meta(description="check every block of a hand-off by crc32 (the kvstore always does)")] = False

    sim_model: Annotated[str, Meta(description="sim: name of the model in lists")] = "sim"
    sim_prefill_seconds: Annotated[float, Meta(ge=0, description="sim: seconds per prompt token")] = 0.0
    sim_step_seconds: Annotated[float, Meta(ge=0, description="sim: seconds per decode step")] = 0.0
    sim_block_bytes: Annotated[int, Meta(ge=16, multiple_of=16, description="sim: bytes of a block")] = 4096
    sim_state_bytes: Annotated[int, Meta(ge=16, multiple_of=16, description="sim: bytes of a state")] = 1024
    sim_vocab_size: Annotated[int, Meta(ge=2, description="sim: ids are below this")] = 129_280
    sim_eos: Annotated[int, Meta(ge=0, description="sim: the id that ends an answer")] = 1
    sim_script: Annotated[
        str,
        Meta(description='sim: file of answers, per line a JSON list of token ids or {"cue": ids, "ids": ids}; none: words'),
    ] = ""
    sim_echo: Annotated[bool, Meta(description="sim: answer with the prompt")] = False

    model_path: Annotated[str, Meta(description="the same as --model")] = ""
    kv_transfer_protocol: Annotated[str, Meta(description="the same as --transports, with one: shm or tcp")] = ""
    tensor_parallel_size: Annotated[int, Meta(description="must be 1: the model has one KV head")] = 1
    pipeline_parallel_size: Annotated[int, Meta(description="must be 1")] = 1

    def __post_init__(self) -> None:
        sim = self.engine == "sim"
        self.num_blocks = self.num_blocks or (4096 if sim else 1024)
        self.max_num_batched_tokens = self.max_num_batched_tokens or (16_384 if sim else 2048)
        if self.model_path:
            if self.model and self.model != self.model_path:
                raise ValueError(f"--model {self.model} and --model-path {self.model_path} differ; give one of them")
            self.model = self.model_path
        if self.engine == "v41" and not self.model:
            raise ValueError(
                "engine v41 needs a checkpoint (of any family): --model FOLDER (`headrace make-checkpoint` writes one), or use "
                "--engine sim"
            )
        if self.kv_transfer_protocol:
            if self.kv_transfer_protocol not in ("shm", "tcp"):
                raise ValueError(
                    f"--kv-transfer-protocol {self.kv_transfer_protocol} is not in this build; use shm (one host) or tcp (any)"
                )
            self.transports = [self.kv_transfer_protocol]
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"--tensor-parallel-size {self.tensor_parallel_size}: all heads share one KV head, so there is nothing to "
                "split; start more instances instead (data parallelism)"
            )
        if self.pipeline_parallel_size != 1:
            raise ValueError(
                f"--pipeline-parallel-size {self.pipeline_parallel_size} is not supported; start more instances instead"
            )

    @property
    def compute_threads(self) -> int:
        return self.threads or max(1, usable_cores() // 2)
