"""Makes `tiny/`: tiny random-weight models of every architecture, each with transformers' float32 logits.

Owns the list of tiny models, their weights, tokenizers and goldens. Needs torch, transformers, tokenizers and
safetensors; the tests only read what it wrote. Weights are seeded and rounded to the stored type first, so the golden
is of exactly the stored weights. Run as `python -m tests.golden.make_tiny [name ...]`.

Each folder holds config.json, model.safetensors (or two shards and their index), tokenizer.json, tokenizer_config.json,
generation_config.json and golden.npz with `input_ids` int32 [n] and `logits` float32 [n, vocab].
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
OUT = HERE / "tiny"
NUM_TOKENS = 80

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Tiny:
    """One tiny model: its config.json, how its weights are stored, and its tokenizer family."""

    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shards: int = 1
    tokenizer: str = "smollm"  # smollm | llama-bpe | qwen2 | gemma
    tokenizer_vocab: int = 0  # 0: the model's own vocab_size; smaller: the model's rows are padded
    generation: dict[str, Any] = field(default_factory=dict)


def base(model_type: str, **extra: Any) -> dict[str, Any]:
    """A config.json in the style that published checkpoints use, with the sizes most tiny models share."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3_text": "Gemma3"}
    config: dict[str, Any] = {
        "architectures": [f"{names[model_type]}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 301,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    config.update(extra)
    return config


GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "num_hidden_layers": 7,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS: dict[str, Tiny] = {
    # SmolLM2's shape of config: tied, no head_dim key, 3 heads sharing 1, ffn 3 x 32.
    "llama-tied": Tiny(
        {
            k: v
            for k, v in base(
                "llama",
                tie_word_embeddings=True,
                hidden_size=96,
                num_attention_heads=6,
                intermediate_size=96,
                rope_theta=100000.0,
            ).items()
            if k != "head_dim"
        },
        torch.float16,
        generation={"bos_token_id": 0, "eos_token_id": 2},
    ),
    "llama-untied-bf16-sharded": Tiny(base("llama", num_hidden_layers=3, rms_norm_eps=1e-6), torch.bfloat16, shards=2),
    "llama3-rope": Tiny(
        base(
            "llama",
            rope_theta=500000.0,
            rope_scaling=LLAMA3_ROPE,
            head_dim=32,
            intermediate_size=96,
            vocab_size=333,
            tie_word_embeddings=True,
            bos_token_id=328,
            eos_token_id=[329, 332],
        ),
        tokenizer="llama-bpe",
        generation={
            "bos_token_id": 328,
            "eos_token_id": [329, 332],
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
        },
    ),
    "mistral-full-f16": Tiny(base("mistral", sliding_window=None, head_dim=32), torch.float16),
    # Written as transformers 5 writes it: rope_parameters and dtype instead of rope_theta and torch_dtype.
    "mistral-window": Tiny(
        {
            k: v
            for k, v in base(
                "mistral",
                sliding_window=24,
                num_hidden_layers=3,
                intermediate_size=96,
                num_key_value_heads=1,
                rope_parameters={"rope_theta": 20000.0, "rope_type": "default"},
            ).items()
            if k != "rope_theta"
        }
    ),
    "qwen2-tied": Tiny(
        base(
            "qwen2",
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            vocab_size=320,
            use_sliding_window=False,
            sliding_window=24,
            max_window_layers=1,
            bos_token_id=298,
            eos_token_id=300,
        ),
        tokenizer="qwen2",
        tokenizer_vocab=301,
        generation={"eos_token_id": [300, 298], "pad_token_id": 298, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ),
    "qwen3-tied-bf16": Tiny(
        base(
            "qwen3",
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            head_dim=32,
            num_hidden_layers=3,
            bos_token_id=298,
            eos_token_id=300,
        ),
        torch.bfloat16,
        tokenizer="qwen2",
        generation={"eos_token_id": [300, 298], "pad_token_id": 298, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    "qwen3-untied": Tiny(
        base("qwen3", rms_norm_eps=1e-6, rope_theta=1000000.0, bos_token_id=298, eos_token_id=300), tokenizer="qwen2"
    ),
    # Gemma 3 as published with transformers 4: sliding_window_pattern and rope_local_base_freq. The query scale is not
    # 1/sqrt(head_dim).
    "gemma3-bf16": Tiny(
        base(
            "gemma3_text",
            **GEMMA,
            rope_local_base_freq=10000.0,
            sliding_window_pattern=6,
            query_pre_attn_scalar=24,
        ),
        torch.bfloat16,
        tokenizer="gemma",
        generation={"bos_token_id": 2, "eos_token_id": [1, 300], "do_sample": True, "top_k": 64, "top_p": 0.95},
    ),
    # Gemma 3 as transformers 5 writes it: layer_types and one rope_parameters entry per kind of layer; one kv head.
    "gemma3-layer-types": Tiny(
        {
            k: v
            for k, v in base(
                "gemma3_text",
                **{**GEMMA, "num_hidden_layers": 3, "num_key_value_heads": 1, "hidden_size": 96},
                head_dim=32,
                query_pre_attn_scalar=32,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters={
                    "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
            ).items()
            if k != "rope_theta"
        },
        torch.float16,
        tokenizer="gemma",
        generation={"bos_token_id": 2, "eos_token_id": [1, 300]},
    ),
}


def train_text() -> list[str]:
    """Lines the tokenizers are trained on: enough to find a few dozen merges."""
    return (HERE / "text" / "prose.txt").read_text(encoding="utf-8").splitlines()


def make_tokenizer(family: str, vocab_size: int) -> tuple[Tokenizer, dict[str, Any]]:
    """A byte-level BPE tokenizer of exactly `vocab_size` ids in the family's manner, and its tokenizer_config.json."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pre: pre_tokenizers.PreTokenizer
    if family == "smollm":
        pre = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        first, last = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], []
        bos, eos, unk = "<|endoftext|>", "<|im_end|>", "<|endoftext|>"
    elif family == "llama-bpe":
        pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), byte_level])
        first = []
        last = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        bos, eos, unk = "<|begin_of_text|>", "<|eot_id|>", None
    elif family == "qwen2":
        pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"), byte_level])
        first, last = [], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        bos, eos, unk = None, "<|im_end|>", None
    elif family == "gemma":
        pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        first, last = ["<pad>", "<eos>", "<bos>"], ["<start_of_turn>", "<end_of_turn>"]
        bos, eos, unk = "<bos>", "<eos>", None
    else:
        raise ValueError(family)
    tokenizer = Tokenizer(
        models.BPE(unk_token=None, fuse_unk=False, byte_fallback=False, ignore_merges=family == "llama-bpe")
    )
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(last),
        special_tokens=first,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train_text(), trainer)
    tokenizer.add_special_tokens(first + last)
    if family in ("llama-bpe", "gemma"):
        assert bos is not None
        bos_id = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == vocab_size, tokenizer.get_vocab_size()
    template = CHATML
    if family == "llama-bpe":
        template = (
            "{{ bos_token }}{% for message in messages %}"
            "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
            "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
        )
    elif family == "gemma":
        template = (
            "{{ bos_token }}{% for message in messages %}"
            "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' "
            "else message['role']) + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
        )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for t in first + last
        },
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "pad_token": first[0] if first else last[0],
        "chat_template": template,
    }
    if family in ("llama-bpe", "gemma"):
        config["add_bos_token"] = True
    return tokenizer, config


def fill_weights(model: torch.nn.Module, config: dict[str, Any], seed: int) -> None:
    """Seeded weights at which each part of the model matters, and which forgive a cache in float16.

    Scores spread by 1 and attention adds 0.3 (Gemma: 0.1) to a residual stream of 1: K and V in float16 then move no
    logit by more than half of the 1e-3 that the engine is allowed, while a wrong rope base or window moves some by
    dozens of times that.
    """
    generator = torch.Generator().manual_seed(seed)
    gemma = config["model_type"] == "gemma3_text"
    hidden = config["hidden_size"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if gemma and name.endswith("post_attention_layernorm.weight"):
                value = 0.02 * noise - 0.9  # this norm, not o_proj, sets what attention adds: 0.1
            elif name.endswith("norm.weight"):
                value = 0.15 * noise + (0.1 if gemma else 1.0)
            elif name.endswith(".bias"):
                value = 0.5 * noise
            elif "embed_tokens" in name:
                value = noise * (1 / math.sqrt(hidden) if gemma else 1.0)
            elif "o_proj" in name:
                value = noise * (0.3 / math.sqrt(parameter.shape[1]))
            else:
                value = noise / math.sqrt(parameter.shape[1])
            parameter.copy_(value)


def round_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).to(torch.float32))


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def make(name: str, tiny: Tiny) -> None:
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    new_style = "rope_parameters" in tiny.config
    config = dict(tiny.config)
    config["dtype" if new_style else "torch_dtype"] = str(tiny.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    eos = config["eos_token_id"]
    generation = tiny.generation or {"eos_token_id": eos}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")

    tokenizer, tokenizer_config = make_tokenizer(tiny.tokenizer, tiny.tokenizer_vocab or config["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")

    seed = zlib.crc32(name.encode())
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32
    ).eval()
    fill_weights(model, config, seed)
    round_to(model, tiny.dtype)
    rng = np.random.default_rng(seed)
    ids = [int(i) for i in rng.integers(0, config["vocab_size"], NUM_TOKENS)]
    spread = float(logits_of(model, ids).std())
    with torch.no_grad():  # unit scale through the last norm, which every architecture has
        norm = model.model.norm.weight
        offset = 1.0 if config["model_type"] == "gemma3_text" else 0.0
        norm.copy_((norm + offset) / spread - offset)
    round_to(model, tiny.dtype)

    state = {k: v.to(tiny.dtype).contiguous() for k, v in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    names = list(state)
    if tiny.shards == 1:
        safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for shard in range(tiny.shards):
            part = names[shard :: tiny.shards]
            file = f"model-{shard + 1:05d}-of-{tiny.shards:05d}.safetensors"
            safetensors.torch.save_file({k: state[k] for k in part}, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, file))
        total = sum(t.numel() * t.element_size() for t in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    # The golden is of the folder as a user of transformers would load it.
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    logits = logits_of(loaded, ids)
    assert torch.equal(logits, logits_of(model, ids)), name
    text = "Hello, wörld 123!\n\tdéjà vu 漢字 🙂"
    fast = AutoTokenizer.from_pretrained(folder)
    assert fast(text)["input_ids"] == tokenizer.encode(text).ids, (fast(text)["input_ids"], tokenizer.encode(text).ids)
    fast.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    np.savez(folder / "golden.npz", input_ids=np.array(ids, np.int32), logits=logits.numpy().astype(np.float32))
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:28} {size / 1e3:6.0f} kB  logits std {float(logits.std()):.3f}  max {float(logits.abs().max()):.2f}")


def make_all(names: list[str] | None = None) -> None:
    """Makes the named tiny models, or all."""
    torch.set_num_threads(1)
    for name in names or list(MODELS):
        make(name, MODELS[name])


if __name__ == "__main__":
    make_all(sys.argv[1:])
