"""Every name that a configuration may hold, whichever service is installed here.

A service knows its own settings only, yet one file and one environment serve them all: a word that no service knows is a
misspelling, and this list is what tells. tests/unit/bus/test_names.py compares it with the services' own declarations.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SETTINGS = frozenset(
    """
    acceptance access_log allow_private_addresses api_key api_key_file async_scheduling batch_invariant batch_patches
    body_seconds both bus_grace_seconds capacity_bytes characters_per_token checksums chunk_tokens client_buffer_bytes
    command_seconds confidence_head decoders device dialect draft_budget draft_calibration drain_seconds embedding_bytes engine
    evict_start evict_stop fetch_seconds fetches grammar_seconds growth_tokens host image_bytes image_requests intake_bytes
    keepalive_seconds kv_cache_ttl_hours kv_format kv_secret kv_transfer_protocol kvstore kvstore_wait large_body_bytes
    log_format log_level max_attempts max_body_bytes max_handles max_images max_migrations max_model_len max_num_batched_tokens
    max_num_seqs max_queue max_requests max_ttl_seconds metrics_port model model_path name nats_connect_seconds nats_nkey
    nats_password nats_url nats_user nice num_blocks numerics pipeline_parallel_size pixel_bytes port queue_seconds
    reasoning_alias refuse_above repair replay_bytes request_seconds response_bytes response_seconds rollback_gate
    served_model_name share_port shm_dir sim_block_bytes sim_echo sim_eos sim_model sim_prefill_seconds sim_script
    sim_state_bytes sim_step_seconds sim_vocab_size slab_slots snapshot_bytes speculative stall_seconds swap_bytes tcp_host
    tcp_port template tensor_parallel_size test_faults threads ticket_seconds tiered_kv_storage_path tokenizer trace transports
    worker_seconds workers
    """.split()  # noqa: SIM905
)
# Variables of the launcher, of commands, of compose.yaml and of `docker build`; without their prefix.
OTHERS = frozenset(
    """
    API_KEY BASE_IMAGE BUILD_NETWORK CONFIG DECODE_GPU HOME PREFILL_GPU PRESET PROGRAM PYTHON RDMA_DEVICE SHM_SIZE STATE_DIR
    TORCH TORCH_INDEX VENV WORKER_CPUS WORKER_MEMORY
    """.split()  # noqa: SIM905
)


def nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, as the end of a sentence; nothing if no name is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean `{near[0]}`?" if near else ""
