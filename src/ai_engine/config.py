"""Frozen configuration: every default of the server in one place; the command line and its help are made from it.

A field's text is its help. Sizes are bytes, times are seconds unless the name says otherwise.
"""

from __future__ import annotations

import platform
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ai_engine.ports.errors import ConfigError
from ai_engine.serving.config import ServingConfig

SERVING = ServingConfig()  # its defaults are the server's
MAX_THREADS = 1024
MAX_S = 1_000_000_000  # 30 years: longer times, and infinity, do not survive the way to the worker


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is built from; the same for `serve`, `generate`, `chat`, `bench` and LLM()."""

    threads: Annotated[int, Meta(description="compute threads; 0: cores in the affinity mask and cgroup quota")] = 0
    max_context: Annotated[int, Meta(description="tokens one request may hold; 0: min(model's limit, 8192)")] = 0
    max_seqs: Annotated[int, Meta(description="sequences that run in one step")] = 32
    max_step_tokens: Annotated[
        int, Meta(description="rows (prompt and output tokens) of one step; 0: 512, fewer for wide models")
    ] = 0
    kv_memory: Annotated[
        int, Meta(description="bytes for KV pages; 0: 8 requests at max_context, at most a quarter of free memory")
    ] = 0
    kv_type: Annotated[
        Literal["f16", "int8"],
        Meta(description="how keys and values are kept; int8: half the memory, answers a little less exact"),
    ] = "f16"
    page_tokens: Annotated[int, Meta(description="tokens in a KV page (32 or 64)")] = 32
    eviction: Annotated[
        Literal["lru", "fifo", "hybrid"], Meta(description="which cached prefix page is given up first")
    ] = "lru"
    prefix_cache: Annotated[bool, Meta(description="share KV pages between requests that begin alike")] = True
    speculation: Annotated[
        Literal["off", "lookup"],
        Meta(description="lookup: guess tokens that the prompt or answer held before; changes speed, not answers"),
    ] = SERVING.speculation
    approximate_head: Annotated[
        bool,
        Meta(
            description="APPROXIMATE: greedy and top_k <= 32 find the best tokens with half of a Q8_0 head's bits and "
            "multiply only those exactly; a better one may be missed"
        ),
    ] = False
    kernels: Annotated[
        Literal["cpu", "reference"], Meta(description="cpu: compiled kernels; reference: NumPy, slow, for comparison")
    ] = "cpu"
    cpu: Annotated[
        Literal["auto", "avx2", "avx512", "neon"],
        Meta(description="instruction set of the kernels; auto: the best here"),
    ] = "auto"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve` adds: the door, the queue, the life cycle."""

    host: Annotated[str, Meta(description="address to listen on; other than loopback needs keys")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 picks a free one")] = 8000
    served_name: Annotated[str, Meta(description="model id in /v1/models; default: the name given")] = ""
    alias: Annotated[
        tuple[str, ...],
        Meta(description="further model ids that clients may send; '*' takes any", extra={"many": True}),
    ] = ()
    api_key: Annotated[
        str, Meta(description="an admin's key; every route but health needs a key then (or $AI_ENGINE_API_KEY)")
    ] = ""
    keys: Annotated[
        str,
        Meta(description="file of keys, their limits and rights; read again when it changes (see `ai-engine keys`)"),
    ] = ""
    metrics_addr: Annotated[
        str, Meta(description="HOST:PORT of a second listener with /metrics and health only, without keys")
    ] = ""
    strict: Annotated[bool, Meta(description="refuse unknown and unused request fields instead of warning")] = False
    cors_origin: Annotated[
        tuple[str, ...], Meta(description="web origin that browsers may call from; repeatable", extra={"many": True})
    ] = ()
    in_process: Annotated[bool, Meta(description="run gateway and worker in one process")] = False
    max_queue_requests: Annotated[int, Meta(description="requests that may wait; more are refused with 503")] = (
        SERVING.max_queue_requests
    )
    max_queue_tokens: Annotated[int, Meta(description="prompt and output tokens that may wait")] = (
        SERVING.max_queue_tokens
    )
    step_target_ms: Annotated[float, Meta(description="longest step aimed at; long prompts are cut to fit it")] = (
        SERVING.step_target_s * 1000
    )
    request_timeout_s: Annotated[float, Meta(description="a request fails after this long; 0: never")] = 600.0
    max_body_bytes: Annotated[int, Meta(description="largest request body")] = 8 << 20
    drain_s: Annotated[float, Meta(description="on SIGTERM, seconds for running requests to finish")] = 30.0
    trace_memory: Annotated[
        int, Meta(description="bytes for traces of past requests and steps; the oldest are given up")
    ] = 32 << 20
    otlp_endpoint: Annotated[
        str, Meta(description="send spans to this OpenTelemetry collector (http://HOST:4318, protobuf over HTTP)")
    ] = ""
    slo: Annotated[
        str, Meta(description="file of objectives that /metrics judges (see `ai-engine slo check --help`)")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level logged; info: a line per request")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "text"], Meta(description="of the log on standard error; auto: text on a terminal")
    ] = "auto"
    log_tokens: Annotated[
        tuple[str, ...],
        Meta(description="name of a key whose tokens are logged one by one; '*': all", extra={"many": True}),
    ] = ()
    offline: Annotated[bool, Meta(description="never use the network to find the model")] = False


def fields_of(struct: type[msgspec.Struct]) -> list[tuple[str, Any, Any, str, dict[str, Any]]]:
    """(name, plain type, default, help, extra) of each field of a config struct."""
    hints = get_type_hints(struct, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(struct):
        annotated = hints[field.name]
        plain, meta = get_args(annotated)[0], get_args(annotated)[1]
        rows.append((field.name, plain, field.default, meta.description or "", dict(meta.extra or {})))
    return rows


def check_engine(config: EngineConfig) -> EngineConfig:
    """Raises ConfigError naming the flag, what was found and what is possible."""
    _between("threads", config.threads, 0, MAX_THREADS)
    _at_least("max_context", config.max_context, 0)
    _at_least("max_seqs", config.max_seqs, 1)
    if config.max_step_tokens:
        _at_least("max_step_tokens", config.max_step_tokens, 8)
    _at_least("kv_memory", config.kv_memory, 0)
    if config.page_tokens not in (32, 64):
        raise ConfigError(f"--page-tokens is {config.page_tokens}; use 32 or 64", param="page_tokens")
    _check_literals(config)
    arm = platform.machine() in ("aarch64", "arm64")
    if config.cpu != "auto" and (config.cpu == "neon") != arm:
        raise ConfigError(f"--cpu is {config.cpu}, but this machine is {platform.machine()}; use auto", param="cpu")
    return config


def check_serve(config: ServeConfig) -> ServeConfig:
    """As check_engine; also refuses an open door on a public address."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"--port is {config.port}; use 0 to 65535", param="port")
    _at_least("max_queue_requests", config.max_queue_requests, 1)
    _at_least("max_queue_tokens", config.max_queue_tokens, 1)
    _between("drain_s", config.drain_s, 0, MAX_S)
    _between("request_timeout_s", config.request_timeout_s, 0, MAX_S)
    _at_least("max_body_bytes", config.max_body_bytes, 1024)
    _at_least("trace_memory", config.trace_memory, 1 << 20)
    if config.otlp_endpoint and not config.otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint is {config.otlp_endpoint!r}; use a URL such as http://127.0.0.1:4318",
            param="otlp_endpoint",
        )
    if not 0 < config.step_target_ms <= MAX_S * 1000:
        raise ConfigError(f"--step-target-ms is {config.step_target_ms}; use a positive time", param="step_target_ms")
    if config.metrics_addr:
        host_and_port(config.metrics_addr)
    if not is_loopback(config.host) and not config.api_key and not config.keys:
        raise ConfigError(
            f"--host {config.host} can be reached from other machines, and there is no key. "
            "Give --keys FILE or --api-key KEY (or AI_ENGINE_API_KEY), or listen on 127.0.0.1",
            param="host",
        )
    return config


def host_and_port(address: str) -> tuple[str, int]:
    """'127.0.0.1:9090' or '[::1]:9090' in two. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--metrics-addr is {address!r}; use HOST:PORT, such as 127.0.0.1:9090", param="metrics_addr")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; use at least {low:g}", param=name)


def _between(name: str, value: float, low: float, high: float) -> None:
    _at_least(name, value, low)
    if value > high:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; use at most {high:,}", param=name)


def _check_literals(config: msgspec.Struct) -> None:
    for name, plain, *_ in fields_of(type(config)):
        if get_origin(plain) is Literal and getattr(config, name) not in get_args(plain):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(config, name)!r}; use one of {', '.join(get_args(plain))}",
                param=name,
            )
