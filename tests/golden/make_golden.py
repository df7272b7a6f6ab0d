"""Makes the goldens of the two real models and of the tokenisers: run by `make golden`, which installs what it needs.

Owns what is in smollm2.{json,npz}, gemma3-270m.{json,npz} and tokens.json. Needs numpy, xllamacpp and gguf, and both
model files.

    python -m tests.golden.make_golden [smollm2=PATH] [gemma3-270m=PATH] [--only tiny|tokens|numbers]

Without paths the model files are found as the tests find them. `tiny` runs make_tiny.py, which needs torch and
transformers.

<model>.json  sha256 of the file, what made the golden and with which settings, the summary, each document's token
              ids, and greedy continuations
<model>.npz   one entry per position, documents one after another in the order of the json:
              kl float32                  KL(float64 reference || llama.cpp), nats, temperature 1
              reference_top1 int32        the reference's most likely id
              llamacpp_top1_agrees bool   whether llama.cpp's most likely id is the same
tokens.json   strings and their ids by llama.cpp for both models, special tokens read as such and as plain text,
              without a BOS
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.golden import token_cases
from tests.golden.llamacpp import WHEEL, LlamaCpp
from tests.golden.reference import Matrix, Reference, config_from_gguf, kl_divergence, top1
from tests.golden.tiny_gguf import GGUFFile, read_gguf

HERE = Path(__file__).parent

GREEDY_TOKENS = 32
PROMPTS: dict[str, list[str]] = {
    "smollm2": [
        f"<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in (
            "What is the capital of France?",
            "Write a haiku about the sea.",
            "What is 17 + 25?",
            "Write a Python function that reverses a string.",
        )
    ],
    "gemma3-270m": [
        f"<bos><start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n"
        for question in (
            "What is the capital of France?",
            "Write a haiku about the sea.",
            "用一句话介绍北京。",
            "Write a Python function that reverses a string.",
        )
    ],
}


def documents() -> dict[str, str]:
    return {f.stem: f.read_bytes().decode("utf-8") for f in sorted((HERE / "text").glob("*.txt"))}


def check_dequantizers(path: Path, ours: GGUFFile) -> str:
    """Every tensor of the file, dequantised by us and by the gguf package, must be equal bit by bit."""
    theirs = gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        rows = tensor.data.reshape(mine.raw.shape[0], -1).view(np.uint8)
        for start in range(0, rows.shape[0], 16384):
            part = slice(start, start + 16384)
            expected = gguf.quants.dequantize(rows[part], tensor.tensor_type)
            got = mine[part] if len(mine.shape) > 1 else mine[part][None]
            assert np.array_equal(got, np.asarray(expected, np.float32).reshape(got.shape)), tensor.name
    version = importlib.metadata.version("gguf")
    return f"all {len(theirs.tensors)} tensors dequantise bit-equal to gguf {version}"


def summary(kl: NDArray[Any], agrees: NDArray[Any]) -> dict[str, float]:
    return {
        "kl_mean": float(np.mean(kl)),
        "kl_p99": float(np.percentile(kl, 99)),
        "kl_max": float(np.max(kl)),
        "top1_agreement": float(np.mean(agrees)),
    }


def make_numbers(name: str, path: Path, threads: int) -> None:
    started = time.monotonic()
    file = read_gguf(path)
    checked = check_dequantizers(path, file)
    print(f"{name}: {checked} ({time.monotonic() - started:.0f} s)")
    weights: dict[str, Matrix] = dict(file.tensors)
    weights["token_embd.weight"] = file.tensors["token_embd.weight"][:]  # once, not once per batch of positions
    reference = Reference(config_from_gguf(file.metadata), weights)
    llama = LlamaCpp(path, threads=threads)
    plain = LlamaCpp(path, threads=threads, flash_attention=0)  # for the record only

    docs: list[dict[str, Any]] = []
    kl: list[NDArray[Any]] = []
    kl_plain: list[NDArray[Any]] = []
    best: list[NDArray[np.int32]] = []
    agrees: list[NDArray[np.bool_]] = []
    agrees_plain: list[NDArray[np.bool_]] = []
    for stem, text in documents().items():
        ids = ([] if llama.bos is None else [llama.bos]) + llama.tokenize(text, parse_special=True)
        other, other_plain = llama.logits(ids), plain.logits(ids)
        hidden = reference.hidden(ids)
        doc_kl: list[NDArray[Any]] = []
        for part, logits in reference.logits_in_batches(hidden):
            for at in range(0, logits.shape[0], 8):  # few rows at once: 262,144 float64 words each
                rows = slice(part.start + at, min(part.start + at + 8, part.stop))
                exact = logits[at : at + 8]
                doc_kl.append(kl_divergence(exact, other[rows]))
                kl_plain.append(kl_divergence(exact, other_plain[rows]))
            best.append(top1(logits))
            agrees.append(best[-1] == top1(other[part]))
            agrees_plain.append(best[-1] == top1(other_plain[part]))
        kl += doc_kl
        docs.append({"name": stem, "ids": ids})
        mean = float(np.mean(np.concatenate(doc_kl)))
        print(f"  {stem:10} {len(ids):4} tokens  mean KL {mean:.2e}  ({time.monotonic() - started:.0f} s)", flush=True)

    all_kl, all_agrees = np.concatenate(kl), np.concatenate(agrees)
    greedy = []
    for prompt in PROMPTS[name]:
        ids = llama.tokenize(prompt, parse_special=True)
        continuation, leads = llama.greedy(ids, GREEDY_TOKENS)
        greedy.append({"prompt": prompt, "ids": ids, "continuation": continuation, "leads": leads})
    result = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_by": {
            "reference": "tests/golden/reference.py in float64",
            "dequantisation": checked,
            "numpy": np.__version__,
            "llama.cpp": f"xllamacpp {WHEEL}",
            "llama.cpp settings": "defaults: f16 K and V, flash attention auto, weight repacking on, n_ubatch 512; "
            "one sequence per document, all positions in one llama_decode",
            "system": llama.system_info(),
            "threads": threads,
        },
        "bos": llama.bos,
        "num_tokens": int(all_kl.size),
        "llamacpp": summary(all_kl, all_agrees),
        "llamacpp_without_flash_attention": summary(np.concatenate(kl_plain), np.concatenate(agrees_plain)),
        "documents": docs,
        "greedy": greedy,
    }
    llama.close()
    plain.close()
    text = json.dumps(result, indent=1, ensure_ascii=False)
    (HERE / f"{name}.json").write_text(_one_line_lists(text) + "\n", encoding="utf-8")
    np.savez_compressed(
        HERE / f"{name}.npz",
        kl=all_kl.astype(np.float32),
        reference_top1=np.concatenate(best),
        llamacpp_top1_agrees=all_agrees,
    )
    print(f"{name}: {all_kl.size} tokens, {result['llamacpp']}, no FA {result['llamacpp_without_flash_attention']}")


def _one_line_lists(text: str) -> str:
    """json.dumps(indent=1) with every list of numbers on one line."""
    out: list[str] = []
    numbers: list[str] | None = None
    for line in text.splitlines():
        if line.endswith(": ["):
            out.append(line)
            numbers = []
        elif numbers is not None and line.strip() in ("]", "],"):
            out[-1] += ", ".join(numbers) + line.strip()
            numbers = None
        elif numbers is not None and line.strip().rstrip(",").lstrip("-").replace(".", "").isdigit():
            numbers.append(line.strip().rstrip(","))
        else:
            out.append(line)
            numbers = None
    return "\n".join(out)


def make_tokens(paths: dict[str, Path]) -> None:
    strings = token_cases.strings(documents())
    cases: list[dict[str, Any]] = [{"text": s} for s in strings]
    made: dict[str, Any] = {}
    for name, path in paths.items():
        llama = LlamaCpp(path, threads=1)
        for case in cases:
            case[name] = llama.tokenize(case["text"], parse_special=True)
            plain = llama.tokenize(case["text"], parse_special=False)
            if plain != case[name]:
                case[f"{name}_plain"] = plain
        made[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        llama.close()
    head = {
        "what": "ids by llama.cpp (llama_tokenize, add_special false: no BOS). <model>: special tokens in the text are "
        "read as such (parse_special true); <model>_plain: as plain text (false), present only where it differs",
        "made_by": f"xllamacpp {WHEEL}",
        "sha256": made,
    }
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=True) for case in cases)
    body = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + ',\n "cases": [\n' + lines + "\n ]\n}\n"
    assert json.loads(body)["cases"] == cases
    (HERE / "tokens.json").write_text(body, encoding="utf-8")
    print(f"tokens: {len(cases)} strings")


def main() -> None:
    parser = argparse.ArgumentParser(description="Remake the committed goldens.")
    parser.add_argument(
        "models", nargs="*", metavar="NAME=PATH", help=f"one of {', '.join(PROMPTS)}; default: both, as installed"
    )
    parser.add_argument("--only", choices=["tiny", "tokens", "numbers"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.only in (None, "tiny"):
        from tests.golden import make_tiny  # torch and transformers, which the other goldens do without

        make_tiny.make_all()
    if args.only == "tiny":
        return
    paths = {name: Path(path) for name, _, path in (m.partition("=") for m in args.models)}
    if not paths:
        from tests.conftest import model_path

        paths = {name: model_path(name) for name in PROMPTS}
    if args.only != "numbers":
        if set(paths) != set(PROMPTS):
            parser.error("tokens.json needs both models")
        make_tokens({name: paths[name] for name in PROMPTS})
    if args.only != "tokens":
        for name, path in paths.items():
            make_numbers(name, path, args.threads)


if __name__ == "__main__":
    main()
