"""The house in order: one version, documents that name things that exist, limits that the README repeats."""

from __future__ import annotations

import math
import platform
import re
import tomllib
from pathlib import Path

import pytest

import ai_engine
from ai_engine.cli import build_parser
from ai_engine.config import EngineConfig, ServeConfig, check_engine, check_serve
from ai_engine.ports.errors import ERRORS_BY_CODE, AiEngineError, ConfigError, error_from_code

ROOT = Path(__file__).resolve().parents[2]


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == ai_engine.__version__


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named <= targets


def test_commands_of_the_readme_parse() -> None:
    """Each `ai-engine ...` in the README's table is a command line that the parser takes."""
    lines = re.findall(r"`ai-engine ([^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(lines) >= 5
    for line in lines:
        words = re.findall(r'"[^"]*"|\S+', line)
        build_parser().parse_args([word.strip('"') for word in words])


def test_the_error_tree_page_lists_every_class() -> None:
    import ai_engine.ports.errors as errors

    assert errors.__doc__ is not None
    rows = dict(re.findall(r"^ +[|\- ]*(\w+) +(\w+) +\d{3}", errors.__doc__, re.M))
    assert rows == {cls.__name__: code for code, cls in ERRORS_BY_CODE.items()}
    for code, cls in ERRORS_BY_CODE.items():
        assert type(error_from_code(code, "x")) is cls
    assert type(error_from_code("no_such_code", "x")) is AiEngineError


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (EngineConfig(max_seqs=0), "--max-seqs"),
        (EngineConfig(threads=-1), "--threads"),
        (EngineConfig(page_tokens=24), "--page-tokens"),
        (ServeConfig(host="0.0.0.0"), "--host"),
        (ServeConfig(host="::"), "--host"),
        (ServeConfig(port=70000), "--port"),
        (ServeConfig(step_target_ms=0), "--step-target-ms"),
        (ServeConfig(step_target_ms=math.nan), "--step-target-ms"),
        (ServeConfig(step_target_ms=math.inf), "--step-target-ms"),
        (ServeConfig(drain_s=math.inf), "--drain-s"),
        (ServeConfig(request_timeout_s=math.inf), "--request-timeout-s"),
        (EngineConfig(threads=10**20), "--threads"),
        (EngineConfig(cpu="avx2" if platform.machine() in ("aarch64", "arm64") else "neon"), "--cpu"),
    ],
)
def test_bad_configuration_names_the_flag(config: EngineConfig | ServeConfig, flag: str) -> None:
    def check() -> object:
        return check_engine(config) if isinstance(config, EngineConfig) else check_serve(config)

    with pytest.raises(ConfigError, match=flag):
        check()


@pytest.mark.parametrize("text", ["inf", "1e400", "nan", "M", "", "-", "5X"])
def test_what_is_no_size_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["generate", "m", f"--kv-memory={text}"])
    assert caught.value.code == 2
    assert "is not a size" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.2.1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert check_serve(ServeConfig(host=host)).host == host


def test_a_key_opens_other_addresses() -> None:
    assert check_serve(ServeConfig(host="0.0.0.0", api_key="k")).api_key == "k"
