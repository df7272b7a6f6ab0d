"""llama.cpp as an oracle: its C API, called with ctypes through the library inside the `xllamacpp` wheel.

Owns the struct layouts of that one pinned wheel and three operations: tokenise, logits at every position, greedy
continuation. Only make_golden.py uses it; the tests read what it wrote. The struct fields follow llama.h of that
build; `defaults_look_right` fails loudly when another build's differ.
"""

from __future__ import annotations

import ctypes as c
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WHEEL = "2026.10.11549"


class ModelParams(c.Structure):
    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int),
        ("load_mode", c.c_int),
        ("lazy_mode", c.c_int),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    )


class ContextParams(c.Structure):
    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int),
        ("rope_scaling_type", c.c_int),
        ("pooling_type", c.c_int),
        ("attention_type", c.c_int),
        ("flash_attn_type", c.c_int),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int),
        ("type_v", c.c_int),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("unnamed", c.c_void_p),  # a null pointer that this build has and published headers lack
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_silent = _LOG(lambda level, text, data: None)


def _library() -> Any:
    version = importlib.metadata.version("xllamacpp")
    if version != WHEEL:
        raise RuntimeError(f"xllamacpp {version} is installed; the struct layouts here are of {WHEEL}")
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("xllamacpp*.so")
    lib = c.CDLL(str(path))
    pointer = c.c_void_p
    for name, result, arguments in (
        ("llama_backend_init", None, []),
        ("llama_log_set", None, [_LOG, pointer]),
        ("llama_model_default_params", ModelParams, []),
        ("llama_context_default_params", ContextParams, []),
        ("llama_model_load_from_file", pointer, [c.c_char_p, ModelParams]),
        ("llama_init_from_model", pointer, [pointer, ContextParams]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", c.c_int32, [pointer]),
        ("llama_vocab_bos", c.c_int32, [pointer]),
        ("llama_vocab_get_add_bos", c.c_bool, [pointer]),
        ("llama_vocab_is_eog", c.c_bool, [pointer, c.c_int32]),
        ("llama_tokenize", c.c_int32, [pointer, c.c_char_p, c.c_int32, pointer, c.c_int32, c.c_bool, c.c_bool]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, c.c_bool]),
        ("llama_batch_init", Batch, [c.c_int32, c.c_int32, c.c_int32]),
        ("llama_batch_free", None, [Batch]),
        ("llama_decode", c.c_int32, [pointer, Batch]),
        ("llama_get_logits_ith", pointer, [pointer, c.c_int32]),
        ("llama_print_system_info", c.c_char_p, []),
        ("llama_free", None, [pointer]),
        ("llama_model_free", None, [pointer]),
    ):
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


def defaults_look_right(model: ModelParams, context: ContextParams) -> bool:
    """Whether both default structs read as they should: f16 K and V, flash attention 'auto', 512 per ubatch."""
    return (
        (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 2048, 512, 1)
        and (context.type_k, context.type_v, context.flash_attn_type) == (1, 1, -1)
        and (context.yarn_beta_fast, context.defrag_thold, context.offload_kqv, context.embeddings)
        == (-1, -1, True, False)
        and (model.n_gpu_layers, model.split_mode, model.use_extra_bufts, model.vocab_only) == (-1, 1, True, False)
    )


class LlamaCpp:
    """One model file in llama.cpp with its default settings: f16 KV, flash attention 'auto', weight repacking on."""

    def __init__(self, path: Path | str, *, threads: int = 2, context: int = 1024, flash_attention: int = -1) -> None:
        self.lib = _library()
        self.lib.llama_log_set(_silent, None)
        self.lib.llama_backend_init()
        model_params, params = self.lib.llama_model_default_params(), self.lib.llama_context_default_params()
        assert defaults_look_right(model_params, params), "another build's struct layout"
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model, path
        params.n_ctx = context
        params.n_batch = context
        params.n_outputs_max_per_seq = context  # this build refuses more logits rows per sequence than stated here
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash_attention
        self.context = self.lib.llama_init_from_model(self.model, params)
        assert self.context, path
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.vocab_size = int(self.lib.llama_vocab_n_tokens(self.vocab))
        self.batch = self.lib.llama_batch_init(context, 0, 1)
        self.capacity = context

    @property
    def bos(self) -> int | None:
        """The id that the file's metadata wants in front of every text, or None."""
        return int(self.lib.llama_vocab_bos(self.vocab)) if self.lib.llama_vocab_get_add_bos(self.vocab) else None

    def system_info(self) -> str:
        return bytes(self.lib.llama_print_system_info()).decode().strip()

    def tokenize(self, text: str, parse_special: bool) -> list[int]:
        """Ids without a BOS."""
        raw = text.encode("utf-8")
        room = len(raw) + 16
        buffer = (c.c_int32 * room)()
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), buffer, room, False, parse_special)
        assert count >= 0, count
        return list(buffer[:count])

    def decode(self, ids: list[int], start: int, all_logits: bool) -> NDArray[np.float32]:
        """Appends ids at positions `start`...; float32 logits [len(ids), vocab], or [1, vocab] of the last position."""
        assert len(ids) <= self.capacity
        b = self.batch
        b.n_tokens = len(ids)
        for i, token in enumerate(ids):
            b.token[i], b.pos[i], b.n_seq_id[i] = token, start + i, 1
            b.seq_id[i][0] = 0
            b.logits[i] = 1 if all_logits or i == len(ids) - 1 else 0
        code = self.lib.llama_decode(self.context, b)
        assert code == 0, code
        wanted = range(len(ids)) if all_logits else (len(ids) - 1,)
        out = np.empty((len(wanted), self.vocab_size), np.float32)
        for row, i in enumerate(wanted):
            address = self.lib.llama_get_logits_ith(self.context, i)
            assert address, i
            out[row] = np.ctypeslib.as_array((c.c_float * self.vocab_size).from_address(address))
        return out

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Teacher-forced logits [len(ids), vocab] of a sequence that starts at position 0."""
        self.clear()
        return self.decode(ids, 0, all_logits=True)

    def greedy(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """The next ids up to `count` or an end-of-generation id (included), and the lead in logits of each."""
        self.clear()
        row = self.decode(ids, 0, all_logits=False)[0]
        out: list[int] = []
        leads: list[float] = []
        at = len(ids)
        while True:
            second, first = np.partition(row, -2)[-2:]
            token = int(row.argmax())
            out.append(token)
            leads.append(round(float(first - second), 4))
            if len(out) == count or self.lib.llama_vocab_is_eog(self.vocab, token):
                return out, leads
            row = self.decode([token], at, all_logits=False)[0]
            at += 1

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)
