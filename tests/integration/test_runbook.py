"""docs/runbook.md: ten planted slow causes, each told from its trace by its own figure, and by none of the others'."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ai_engine.cli import build_parser
from tests.integration import runbook_pictures
from tests.integration.causes import CAUSES, Cause, Door, Trace, serve

ROOT = Path(__file__).parents[2]
TRIES = 3  # a neighbour of the machine plants causes of its own


@pytest.fixture(scope="module")
def doors(smollm2: Path) -> Iterator[dict[bool, Door]]:
    """By whether it is the small server's."""
    servers = {small: serve(str(smollm2), small=small) for small in (False, True)}
    yield {small: Door(server.url) for small, server in servers.items()}
    for server in servers.values():
        assert server.stop() == 0


def figures(quick: Trace, slow: Trace) -> str:
    """A row of the matrix of causes and figures."""
    return "\n".join(
        f"{cause.name:<16} {cause.figure(quick):>12.5f} -> {cause.figure(slow):>12.5f} {cause.tells(quick, slow)}"
        for cause in CAUSES
    )


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_cause_sets_off_its_own_figure_alone(cause: Cause, doors: dict[bool, Door]) -> None:
    for _ in range(TRIES):
        quick, slow = cause.plant(doors[cause.small])
        if [other.name for other in CAUSES if other.tells(quick, slow)] == [cause.name]:
            break
    else:
        pytest.fail(f"planted: {cause.name}\n{figures(quick, slow)}")


def test_the_page_has_every_cause_and_its_picture() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    for cause in CAUSES:
        assert f"\n## {cause.title}\n" in page
        picture = runbook_pictures.path_of(cause)
        assert f"({picture.relative_to(ROOT / 'docs')})" in page
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_names_flags_and_metrics_that_there_are() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"ai_engine_\w+", page))
    assert named
    assert all(f"`{name}`" in metrics for name in named)
    flags = set(re.findall(r"`(--[a-z-]+)", page))
    assert flags
    for flag in flags:
        build_parser().parse_args(["serve", "model", flag, "int8" if flag == "--kv-type" else "1"])
