"""The pictures of docs/runbook.md: every cause planted, and the console's panels of its slow trace photographed.

    python -m tests.integration.runbook_pictures [NAME OF A CAUSE ...]

Owns which step a picture shows and where the files lie. Needs Chromium.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.browser import Page, find_chromium, new_page
from tests.integration.causes import CAUSES, Cause, Door, Trace, is_own, serve

FOLDER = Path(__file__).parents[2] / "docs" / "runbook"
WIDTH = 920
DRAWN = "(s => s !== null && s.childElementCount > 5)(document.querySelector('{} svg'))"
EXTENT = """
(panel => [panel.getBoundingClientRect().top,
           (panel.querySelector('.legend') ?? panel).getBoundingClientRect().bottom])(document.querySelector('{}'))
"""  # the table of a step's layers below its legend is left out


def path_of(cause: Cause) -> Path:
    return FOLDER / f"{cause.name.replace(' ', '-').lower()}.png"


def telling_step(cause: Cause, trace: Trace) -> int | None:
    """The step whose picture says more than the whole request's, if there is one."""
    steps: list[Trace] = trace["steps"]
    if cause.name == "long neighbour":
        return int(max(steps, key=lambda step: step["all_rows"])["step"])
    if cause.name in ("CPU stolen", "slow sampling", "deep context"):
        own = sorted((step for step in steps if is_own(step)), key=lambda step: step["seconds"])
        return int(own[len(own) // 2 if cause.name == "CPU stolen" else 0]["step"])
    return None


def photograph(page: Page, url: str, cause: Cause, trace: Trace) -> None:
    step = telling_step(cause, trace)
    page.open("about:blank")  # a change of the hash alone would load nothing
    page.open(f"{url}/console#/trace/{trace['trace_id']}" + ("" if step is None else f"/step/{step}"))
    panel = "#waterfall" if step is None else "#step"
    page.wait(DRAWN.format(panel))
    top, bottom = page.read(EXTENT.format(panel))
    page.photograph(path_of(cause), {"x": 0, "y": top - 10, "width": WIDTH, "height": bottom - top + 14, "scale": 1})


def main(names: list[str]) -> None:
    chromium = find_chromium()
    assert chromium is not None, "needs Chromium: apt-get install chromium"
    FOLDER.mkdir(exist_ok=True)
    for small in (False, True):
        causes = [cause for cause in CAUSES if cause.small == small and (not names or cause.name in names)]
        if not causes:
            continue
        server = serve("smollm2", small=small)
        try:
            for cause in causes:
                _, slow = cause.plant(Door(server.url))
                with new_page(chromium, WIDTH) as page:
                    photograph(page, server.url, cause, slow)
                sys.stdout.write(f"{path_of(cause)}: {path_of(cause).stat().st_size / 1024:.0f} KiB\n")
        finally:
            server.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
