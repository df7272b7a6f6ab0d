"""Token ids equal llama.cpp's: on 700 strings from everywhere in Unicode, and on the documents of the numbers test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import model_path
from tests.golden import engine, goldens

CASES: list[dict[str, Any]] = json.loads((goldens.HERE / "tokens.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("parse_special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("model", goldens.MODELS)
def test_ids_equal_llamacpp(model: str, parse_special: bool) -> None:
    assert len(CASES) >= 300
    path = model_path(model)
    wrong = []
    for case in CASES:
        expected = case[model] if parse_special else case.get(f"{model}_plain", case[model])
        got = engine.tokenize(path, case["text"], parse_special)
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), -1)
            wrong.append(f"{case['text'][:60]!r}: got {got[:20]}, expected {expected[:20]}, first at {at}")
    assert not wrong, f"{len(wrong)} of {len(CASES)} differ:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("model", goldens.MODELS)
def test_document_ids_equal_llamacpp(model: str) -> None:
    golden = goldens.load(model)
    assert sum(len(d.ids) for d in golden.documents) >= 2000
    path = model_path(model)
    bos = [] if golden.bos is None else [golden.bos]
    for document in golden.documents:
        assert bos + engine.tokenize(path, document.text, True) == document.ids, document.name
