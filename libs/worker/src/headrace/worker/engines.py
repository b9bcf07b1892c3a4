"""Makes the engine that the settings name, over memory that peers can write into. Runs in a thread: loading takes a while.

The only place that knows that there are two engines. torch is imported here and only for the real one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import structlog

from headrace.bus import StartError
from headrace.engine import api

from .settings import WorkerSettings

log = structlog.get_logger()

Register = Callable[[str, int], memoryview]  # (region, bytes) -> memory of this process that peers may reach


def build(settings: WorkerSettings, role: str, register: Register) -> api.Engine:
    """`role`: prefill | decode. ValueError, OSError or RuntimeError names what is wrong."""
    engine = _simulated(settings, register) if settings.engine == "sim" else _real(settings, role, register)
    info = engine.info
    log.info("engine ready", engine=info.kind, model=info.model_name, blocks=info.num_blocks, block_bytes=info.block_bytes,
             layout=info.layout_id, checkpoint=info.checkpoint, max_model_len=info.max_model_len)  # fmt: skip
    return engine


def _simulated(settings: WorkerSettings, register: Register) -> api.Engine:
    from .sim import SimConfig, SimEngine, load_script

    script, replies = load_script(settings.sim_script) if settings.sim_script else ((), ())
    config = SimConfig(
        num_blocks=settings.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or 131_072,
        block_bytes=settings.sim_block_bytes,
        state_bytes=settings.sim_state_bytes,
        vocab_size=settings.sim_vocab_size,
        eos_token_ids=(settings.sim_eos,),
        prefill_seconds_per_token=settings.sim_prefill_seconds,
        decode_step_seconds=settings.sim_step_seconds,
        max_snapshots=settings.snapshot_bytes // settings.sim_state_bytes,
        script=script,
        replies=replies,
        echo=settings.sim_echo,
        model_name=settings.sim_model,
        checkpoint=f"sim:{settings.sim_model}",
    )
    return SimEngine(config, register("kv", config.num_blocks * config.block_bytes))


def _chunks(settings: WorkerSettings, role: str) -> tuple[int, ...]:
    """By default a prompt takes half of a step, so that others come along beside a long one."""
    if settings.chunk_tokens or role != "prefill":
        return tuple(settings.chunk_tokens)
    return (max(1, settings.max_num_batched_tokens // 2),)


def _real(settings: WorkerSettings, role: str, register: Register) -> api.Engine:
    if settings.device != "cpu":
        raise StartError(
            f"device {settings.device!r}: {role} keeps its KV in host memory that other processes write into, so it runs on "
            "'cpu' so far; on a GPU the engine runs offline (headrace bench engine --device cuda, headrace.engine.LLM)"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.compute_threads))
    started = time.monotonic()
    log.info("importing torch")
    import torch

    from headrace.engine import EngineConfig, EngineCore
    from headrace.engine.grammar import GrammarError, Grammars
    from headrace.engine.loader import load_model

    torch.set_num_threads(settings.compute_threads)
    log.info("loading", model=settings.model, threads=settings.compute_threads)
    model: Any = load_model(
        settings.model,
        kv_store=settings.kv_format,
        numerics=settings.numerics,
        batch_invariant=settings.batch_invariant,
        device=settings.device,
    )
    log.info("loaded", seconds=round(time.monotonic() - started, 2))
    config = EngineConfig(
        role=role,
        num_blocks=settings.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or None,
        snapshot_bytes=settings.snapshot_bytes,
        swap_bytes=settings.swap_bytes,
        chunk_tokens=_chunks(settings, role),
        speculative=settings.speculative,
        acceptance=settings.acceptance,
        draft_budget=None if settings.draft_budget < 0 else settings.draft_budget,
        draft_calibration=settings.draft_calibration,
        confidence_normed={"config": None, "raw": False, "normed": True}[settings.confidence_head],
        rollback_gate=settings.rollback_gate,
        async_scheduling=settings.async_scheduling,
        model_name=os.path.basename(os.path.normpath(settings.model)),
    )
    grammars = None
    if role == "decode":  # where tokens are chosen
        grammars = Grammars(os.path.join(settings.model, "tokenizer.json"), model.vocab_size, model.eos_token_ids)
        try:  # now: it holds the interpreter's lock for long enough that a serving worker would be taken for dead
            grammars.load()
        except GrammarError as error:
            log.warning("structured output will be refused", why=str(error))
    kv_buffer = register("kv", model.spec.block_bytes * settings.num_blocks)
    engine = EngineCore(model, config, kv_buffer=kv_buffer, grammars=grammars)
    if drafts := engine.speculator:
        log.info("drafts", acceptance=settings.acceptance, calibration=drafts.options.calibration,
                 temperatures=list(drafts.options.temperatures))  # fmt: skip
    started = time.monotonic()
    log.info("warming up")
    _warm_up(engine)
    log.info("warm", seconds=round(time.monotonic() - started, 2))
    return engine


def _warm_up(engine: api.Engine) -> None:
    """One prompt and one token through every layer, so that the first client does not pay for what is made on first use."""
    vocab = engine.info.vocab_size
    ids = [3 % vocab] * min(engine.info.block_tokens - 1, engine.info.max_model_len - 2)
    engine.submit(api.EngineRequest("warm-up", ids, [], api.SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1)))
    while engine.has_work():
        plan = engine.plan()
        for event in engine.apply(plan, engine.execute(plan)):
            if isinstance(event, api.Failed):
                raise RuntimeError(f"the engine failed at its first prompt: {event.message}")
    engine.release("warm-up")
