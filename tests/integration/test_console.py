"""The console in a headless Chromium, on a server that works: live figures, the KV map, from a request to its kernels.

``CONSOLE_SHOTS=FOLDER`` keeps the photographs for people to look at.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ai_engine.testing.process import Server
from tests.integration.browser import Page, find_chromium, new_page

KEY = "console-test-key-0123456789"
CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium (.ci/run does)")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    running = Server(str(tiny_model), "--served-name", "tiny", "--api-key", KEY, "--kv-memory", "8000000")
    yield running
    assert running.stop() == 0


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    assert CHROMIUM is not None, "Chromium is not installed; .ci/run installs it"
    with new_page(CHROMIUM) as page:
        yield page


def ask(url: str, *, stream: bool, max_tokens: int, prompt: str) -> str:
    """The trace id."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True, "temperature": 0}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()
        return str(reply.headers["x-ai-trace-id"])


def enter_key(page: Page) -> None:
    page.wait("document.querySelector('nav a.on') !== null")  # the scripts run
    page.read(f"(k => {{k.value = {KEY!r}; k.dispatchEvent(new Event('change'))}})(document.querySelector('#key'))")


def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("CONSOLE_SHOTS"):
        page.photograph(Path(folder) / f"{name}.png")


def test_live_figures_move_under_load(server: Server, page: Page) -> None:
    page.open(f"{server.url}/console")
    page.wait("document.querySelector('#notice').innerText.includes('key')")  # no figures without one
    enter_key(page)
    working = True

    def load(number: int) -> None:
        while working:
            ask(server.url, stream=True, max_tokens=300, prompt=f"{number} " * 200)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        tiles = "[...document.querySelectorAll('.tile')]"
        tile = tiles + ".find(t => t.innerText.startsWith('{}')).querySelector('b').innerText.replace(',', '')"
        page.wait("document.querySelectorAll('.tile').length === 10 && document.querySelector('#notice').hidden")
        page.wait(f"parseInt({tile.format('output')}) > 100")
        page.wait(f"parseInt({tile.format('running')}) > 0")
        page.wait(f"{tile.format('time to first token')} !== '–'")
        page.wait(f"{tile.format('gap between tokens')} !== '–'")
        held = "parseInt(document.querySelector('[data-state=held]').innerText.split(' ')[1])"
        page.wait(f"{held} > 0")
        drawn = "(c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some(v => v > 0))"
        assert page.read(f"{drawn}(document.querySelector('canvas.kv'))")
        assert page.read("document.querySelectorAll('.uplot canvas').length") == 4
        page.wait("new Promise(done => setTimeout(() => done(true), 2500))")
        keep(page, "live")
    finally:
        working = False
        for thread in threads:
            thread.join()
    refused = [problem for problem in page.problems if "401" not in problem]  # before the key was entered
    assert refused == []


def test_a_click_leads_from_a_request_to_its_kernels(server: Server, page: Page) -> None:
    trace = ask(server.url, stream=True, max_tokens=400, prompt="one two three four " * 30)
    page.open(f"{server.url}/console#/requests")
    enter_key(page)
    page.click(f"tr[data-trace='{trace}']")
    parts = page.wait(
        "(t => t.length > 5 && t)([...document.querySelectorAll('#waterfall svg text')].map(e => e.textContent))"
    )
    assert {"request", "tokenise", "queue", "prefill", "decode", "send"} <= set(parts)
    keep(page, "trace")
    steps = page.read("document.querySelectorAll('#waterfall rect.pick').length")
    assert steps >= 10
    page.click("#waterfall rect.pick:nth-child(10)")
    page.wait("document.querySelectorAll('#step tr[data-op=matmul]').length > 0")
    ops = page.read("[...document.querySelectorAll('#step tr[data-op]')].map(row => [row.dataset.op, row.textContent])")
    assert {op for op, _ in ops} >= {"matmul", "attention", "sample"}
    assert all(any(unit in text for unit in ("µs", "ms")) for _, text in ops), "every op has its time"
    assert page.read("document.querySelectorAll('#step svg rect').length") > len(ops)
    assert trace[:8] in page.read("document.querySelector('#step').innerText"), "the step names its requests"
    keep(page, "step")
    assert [problem for problem in page.problems if "401" not in problem] == []


def test_an_answer_is_streamed_and_leads_to_its_trace(server: Server, page: Page) -> None:
    page.open(f"{server.url}/console#/try")
    enter_key(page)
    page.click("#send")
    page.wait("document.querySelector('#facts a') !== null")
    assert page.read("document.querySelector('#answer').innerText.length") > 0
    keep(page, "try")
    page.click("#facts a")
    page.wait("document.querySelector('#waterfall') !== null")


def test_what_cannot_be_shown_is_said(server: Server, page: Page) -> None:
    page.open(f"{server.url}/console#/trace/{'0' * 31}1")
    enter_key(page)
    page.wait("document.querySelector('#notice').innerText.includes('There is no trace')")
