"""FlashMLA and DeepGEMM, where installed, as closures for a race on the same inputs. Nothing else imports this.

Looked for under their own names and inside a vLLM installation. An absent or failing peer is an empty dictionary, with
the reason in `problems`.
"""

import importlib

import torch

from headrace.kernels.kv_layouts import PagedKV

problems: dict[str, str] = {}


def _load(*names: str):
    for name in names:
        try:
            return importlib.import_module(name)
        except Exception as error:  # a peer may be missing, or built for another torch
            problems[name] = f"{type(error).__name__}: {error}"
    return None


def _deep_gemm():
    return _load("deep_gemm", "vllm.third_party.deep_gemm") if torch.cuda.is_available() else None


def _flash_mla():
    return _load("flash_mla", "vllm.third_party.flashmla.flash_mla_interface") if torch.cuda.is_available() else None


def deep_gemm_dense(a, a_scale, b, b_scale) -> dict:
    dg = _deep_gemm()
    if dg is None or not a.is_cuda:
        return {}
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    columns = dg.get_mn_major_tma_aligned_tensor(a_scale)

    def run():
        dg.fp8_gemm_nt((a, columns), (b, b_scale), out)
        return out

    return {"deep_gemm": run}


def deep_gemm_contiguous(a, a_scale, b, b_scale, group_of_row) -> dict:
    dg = _deep_gemm()
    if dg is None or not a.is_cuda:
        return {}
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    columns = dg.get_mn_major_tma_aligned_tensor(a_scale)

    def run():
        dg.m_grouped_fp8_gemm_nt_contiguous((a, columns), (b, b_scale), out, group_of_row)
        return out

    return {"deep_gemm": run}


def deep_gemm_masked(a, a_scale, b, b_scale, counts, expected_rows) -> dict:
    dg = _deep_gemm()
    if dg is None or not a.is_cuda:
        return {}
    out = torch.empty(*a.shape[:2], b.shape[1], dtype=torch.bfloat16, device=a.device)
    columns = dg.get_mn_major_tma_aligned_tensor(a_scale)

    def run():
        dg.m_grouped_fp8_gemm_nt_masked((a, columns), (b, b_scale), out, counts, expected_rows)
        return out

    return {"deep_gemm": run}


def flash_mla_dense(q, kv: PagedKV, block_table, seq_lens, scale) -> dict:
    fm = _flash_mla()
    if fm is None or not q.is_cuda:
        return {}
    cache = kv.bytes.view(torch.bfloat16).view(-1, kv.page_size, 1, kv.dim)
    meta, _ = fm.get_mla_metadata()
    return {
        "flash_mla": lambda: fm.flash_mla_with_kvcache(
            q, cache, block_table, seq_lens, 512, meta, None, scale, causal=True
        )[0]
    }


def flash_mla_sparse_decode(q, kv: PagedKV, indices, scale, extra_kv, extra_indices, sink, queries: int) -> dict:
    """q [B * S, H, D] of S = `queries` rows a sequence."""
    fm = _flash_mla()
    if fm is None or not q.is_cuda:
        return {}
    batch = q.shape[0] // queries
    meta, _ = fm.get_mla_metadata()

    def cache(source: PagedKV):
        flat = source.bytes.view(torch.float8_e4m3fn)
        size = source.entry_bytes
        pages = flat.numel() // source.page_stride
        return torch.as_strided(flat, (pages, source.page_size, 1, size), (source.page_stride, size, size, 1))

    def run():
        return fm.flash_mla_with_kvcache(
            q.view(batch, queries, *q.shape[1:]), cache(kv), None, None, 512, meta, None, scale, False, True,
            indices=indices.view(batch, queries, -1), attn_sink=sink,
            extra_k_cache=cache(extra_kv) if extra_kv is not None else None,
            extra_indices_in_kvcache=extra_indices.view(batch, queries, -1) if extra_kv is not None else None,
        )[0].view(*q.shape[:2], 512)  # fmt: skip

    return {"flash_mla": run}


def flash_mla_sparse_prefill(q, kv: PagedKV, indices, scale, sink) -> dict:
    fm = _flash_mla()
    if fm is None or not q.is_cuda:
        return {}
    rows = kv.bytes.view(torch.bfloat16).view(-1, 1, kv.dim)
    return {"flash_mla": lambda: fm.flash_mla_sparse_fwd(q, rows, indices.unsqueeze(1), scale, 512, sink)[0]}
