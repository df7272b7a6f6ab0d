"""The gateway process: HTTP in front, a worker or an in-process engine behind, start, drain and stop.

The port is open from the first moment: until the model is ready, and whenever the worker is gone, /livez answers 200,
/readyz and requests answer 503 with the reason. A worker that dies is started again. Owns processes, signals and what
the terminal shows; app.py owns how parts are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

import msgspec
import uvicorn
import uvloop

from ai_engine import app
from ai_engine.api.app import METRICS_ROUTES, ROUTES, Api
from ai_engine.api.http import ApiConfig, Receive, Scope, Send
from ai_engine.api.keys import Keys
from ai_engine.api.limits import Limiter
from ai_engine.api.openai_types import ServedModel
from ai_engine.api.protocol import bounded_http, connection_limit
from ai_engine.config import EngineConfig, ServeConfig, host_and_port
from ai_engine.data.service import ModelText
from ai_engine.hardware.machine import read_machine
from ai_engine.observe import probes
from ai_engine.observe.host import EngineMemory, Host
from ai_engine.observe.logs import Handler, Log
from ai_engine.observe.metrics import Metrics
from ai_engine.observe.otlp import Exporter
from ai_engine.observe.pages import PageReader
from ai_engine.observe.recorder import Fanout
from ai_engine.observe.sampled import Sampler
from ai_engine.observe.slo import Monitor, read_slo
from ai_engine.observe.steps import StepStore
from ai_engine.observe.traces import Traces
from ai_engine.ports.clock import SystemClock
from ai_engine.ports.errors import AiEngineError, ConfigError, EngineError, NotReady, error_from_code
from ai_engine.ports.progress import Progress
from ai_engine.ports.runtime import Limits, MemoryReport
from ai_engine.ports.telemetry import EngineReady, KeysRead, LoopLag
from ai_engine.ports.text import TextService
from ai_engine.ports.trace import TraceSource
from ai_engine.version import __version__
from ai_engine.wire import ServingClient
from ai_engine.worker import Job, Report

RESTART_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before a dead worker is started again, the last one repeating."""
HEALTHY_LIFE_S = 60.0
EXAMPLE_CHAT = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
UNKNOWN_LIMIT = 1 << 31
LAG_EVERY_S = 0.25
KEYS_POLL_S = 1.0
"""How soon a change of the keys file is seen; SIGHUP makes it now."""


class Gate:
    """The ASGI callable that uvicorn runs: the Api of the moment."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.api(scope, receive, send)
        except asyncio.CancelledError:  # the server stops and this client does not read: no error, so no traceback
            return


class NoText:
    """Stands in for the TextService while the tokeniser is being made: whoever asks for anything is too early."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotReady("the server is not ready: the model is loading", retry_after_s=2.0)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WorkerProcess:
    """One life of the worker."""

    def __init__(self, job: Job) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ai_engine.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C goes to the gateway alone; one session, so that priorities compare (autogroup)
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(job) + b"\n")
            self.process.stdin.flush()  # and it stays open: the worker leaves when our end closes, however we end

    async def report(self) -> Report:
        """Wait until the engine is ready. Raises what it failed with."""
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        if not line:
            code = await asyncio.to_thread(self.process.wait)
            raise EngineError(f"the worker ended with status {code} before it was ready; its output is above")
        report = msgspec.json.decode(line, type=Report)
        if report.limits is None:
            raise error_from_code(report.code, report.message)
        return report

    async def stop(self, at_once: asyncio.Event, grace_s: float = 5.0) -> None:
        """The worker leaves when its socket and its standard input close; terminate, then kill, if it does not or when
        ``at_once`` is set."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        left, hurry = asyncio.ensure_future(asyncio.to_thread(self.process.wait)), asyncio.ensure_future(at_once.wait())
        for end in (self.process.terminate, self.process.kill):
            await asyncio.wait((left, hurry), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not left.done():
                end()
        await left
        hurry.cancel()
        self.process.stdout.close()


class Gateway:
    """State of one `serve`."""

    def __init__(self, model: str, path: Path, engine: EngineConfig, config: ServeConfig, progress: Progress) -> None:
        self.path, self.engine, self.config, self.progress = path, engine, config, progress
        self.name = config.served_name or model
        self.created = int(time.time())
        self.metrics = Metrics(__version__)
        self.steps = StepStore(config.trace_memory, app.cost_of)
        self.traces = Traces(self.steps)
        self.pages = PageReader()
        as_json = config.log_format == "json" or (config.log_format == "auto" and not sys.stderr.isatty())
        self.log = Log(sys.stderr, level=config.log_level, as_json=as_json)
        self.telemetry = Fanout(self.metrics, self.traces, self.log)
        if config.slo:
            monitor = Monitor(read_slo(Path(config.slo)))
            self.telemetry.sinks.append(monitor)
            self.metrics.probes.append(monitor)
        self.memory = EngineMemory(self._pages_now)
        self.servers: list[Server] = []
        self.exporter: Exporter | None = None
        if config.otlp_endpoint:
            resource = {"service.name": "ai_engine", "service.version": __version__, "ai_engine.model": self.name}
            self.exporter = Exporter(config.otlp_endpoint, self.traces, resource)
            self.telemetry.sinks.append(self.exporter)
        self.relay = app.Relay("the model is loading")
        self.stopping = asyncio.Event()
        self.at_once = asyncio.Event()  # asked twice
        self.signal = signal.SIGTERM  # the last one
        loading = ServedModel(
            id=self.name,
            max_context=UNKNOWN_LIMIT,
            vocab_size=UNKNOWN_LIMIT,
            created=self.created,
            aliases=config.alias,
        )
        self.keys = Keys(Path(config.keys) if config.keys else None, admin_key=config.api_key, on_read=self._on_keys)
        self.limiter = Limiter(SystemClock())
        self.gate = Gate(self._api(cast(TextService, NoText()), loading))
        self.metrics_gate = Gate(self._api(cast(TextService, NoText()), loading, only_metrics=True))

    def _attach(self, source: TraceSource | None) -> None:
        """An engine that has come: where its stamps and its pages can be read."""
        self.steps.attach(source)
        self.pages.attach(source.pages if source else None)
        if source is None:
            return
        threads = source.rings.num_threads
        self.traces.roofline = app.load_roofline(threads)
        self.steps.on_period = Sampler(self.steps, self.metrics, self.traces.roofline)
        self.memory.attach(source.pid, source.arenas)
        ops = [call.op for call in source.program.calls]
        self.metrics.emit(EngineReady(threads, source.program.kv_shape.page_tokens, source.max_step_tokens, ops))

    def _add_probes(self) -> None:
        machine = read_machine()
        cores = machine.quota_cores if machine.quota_cores < machine.cores else machine.cores
        host = Host(lambda: {"gateway": os.getpid(), "engine": self.memory.pid or os.getpid()}, cores)
        tracing = functools.partial(probes.tracing, self.traces, self.telemetry, self.exporter)
        self.metrics.probes += [host, self.memory, tracing, self._probe, self.log.probe]

    def _probe(self) -> Iterator[tuple[str, float, tuple[str, ...]]]:
        yield "l7_api_http_connections_open", sum(len(s.server_state.connections) for s in self.servers), ()
        yield "l6_ops_drain_state", self.gate.api.draining, ()
        yield "l6_ops_health_ready", self.relay.target is not None, ()
        if isinstance(self.relay.target, ServingClient):
            yield "l6_ops_telemetry_lost_events", self.relay.target.lost_events, ("wire",)

    def _pages_now(self) -> tuple[int, int, int, float]:
        """Held, cached and all KV pages, and the share of the held ones' room that no token fills."""
        return self.metrics.pages_now()

    async def _watch_lag(self) -> None:
        """How late timers run here tells how late answers are written."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.metrics.emit(LoopLag(max(0.0, loop.time() - due)))

    def _on_keys(self, num_keys: int, good: bool) -> None:
        self.metrics.emit(KeysRead(num_keys, good))

    def _api(self, text: TextService, model: ServedModel, *, only_metrics: bool = False) -> Api:
        config = ApiConfig(
            strict=self.config.strict,
            log_tokens=self.config.log_tokens,
            max_open_requests=self.config.max_queue_requests + self.engine.max_seqs,
            max_body_bytes=self.config.max_body_bytes,
            request_timeout_s=self.config.request_timeout_s or None,
            cors_origins=self.config.cors_origin,
        )
        return Api(
            serving=self.relay,
            text=text,
            model=model,
            telemetry=self.telemetry,
            metrics=self.metrics.render,
            traces=self.traces,
            pages=self.pages,
            config=config,
            keys=None if only_metrics else self.keys,
            limiter=self.limiter,
            routes=METRICS_ROUTES if only_metrics else ROUTES,
        )

    def open_door(self, text: ModelText, limits: Limits, defaults: Mapping[str, float]) -> None:
        """From now on requests are answered."""
        self.gate.api = self._api(
            text,
            ServedModel(
                id=self.name,
                max_context=limits.max_context,
                vocab_size=limits.vocab_size,
                created=self.created,
                aliases=self.config.alias,
                defaults=defaults,
            ),
        )

    async def run(self) -> int:
        listeners = [listen(self.config.host, self.config.port)]
        servers = [http_server(self.gate)]
        if self.config.metrics_addr:
            listeners.append(listen(*host_and_port(self.config.metrics_addr)))
            servers.append(http_server(self.metrics_gate))
        self.servers = servers
        self._on_signals(servers)
        self._add_probes()
        handler = Handler(self.log)
        logging.getLogger().addHandler(handler)
        self.steps.start()
        lag = asyncio.create_task(self._watch_lag())
        listener, watch = listeners[0], asyncio.create_task(self._watch_keys())
        http = asyncio.create_task(serve_all(servers, listeners))
        engine = asyncio.create_task(self._in_process(listener) if self.config.in_process else self._workers(listener))
        stop = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({http, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            engine.cancel()  # ends what is still open, so that its clients hear of it
            outcome = (await asyncio.gather(engine, return_exceptions=True))[0]
            for server in servers:
                server.should_exit = True
            await http
            stop.cancel()
            watch.cancel()
            lag.cancel()
            for listener in listeners:
                listener.close()
            self.steps.stop()
            logging.getLogger().removeHandler(handler)
            await asyncio.to_thread(self.log.close)
            if self.exporter is not None:
                await asyncio.to_thread(self.exporter.close)
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
        return 128 + self.signal if self.at_once.is_set() else 0

    async def _watch_keys(self) -> None:
        """Look at the keys file now and then; a change is in force from then on."""
        while self.config.keys:
            await asyncio.sleep(KEYS_POLL_S)
            self._reload_keys()

    def _reload_keys(self, *, force: bool = False) -> None:
        before = self.keys.error
        if self.keys.reload(force=force):
            say(f"keys: read again, {len(self.keys)} in force")
        elif self.keys.error and (force or self.keys.error != before):
            say(f"keys: {self.keys.error}; the {len(self.keys)} read before stay in force")

    def _on_signals(self, servers: list[Server]) -> None:
        """The first signal drains; the next one stops at once, whatever is still waited for. SIGHUP reads the keys."""

        def on_signal(number: signal.Signals) -> None:
            if self.stopping.is_set() and not self.at_once.is_set():
                say("stopping now")
                self.signal = number
                self.at_once.set()
                for server in servers:
                    server.force_exit = True
            self.stopping.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: self._reload_keys(force=True))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    async def _drain(self) -> None:
        """New work gets 503, running work may finish, then the door closes."""
        self.gate.api.draining = True
        now = await self.relay.health()
        if now.running_requests + now.queued_requests and self.config.drain_s > 0:
            what = f"{now.running_requests} running, {now.queued_requests} queued"
            say(f"draining: {what}; {self.config.drain_s:g} s at most, Ctrl-C again stops now")
        drain = asyncio.ensure_future(self.relay.drain(self.config.drain_s))
        hurry = asyncio.ensure_future(self.at_once.wait())
        await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()
        await asyncio.gather(drain, hurry, return_exceptions=True)

    # the engine, in this process

    async def _in_process(self, listener: socket.socket) -> None:
        local = await app.open_local_path(self.path, self.engine, self.config, self.progress, self.telemetry)
        self._attach(app.trace_source(local.runtime))
        self.relay.target = local.serving
        self.open_door(local.text, local.limits, local.defaults)
        self._announce(listener, local.limits, local.runtime.memory, chats=answers_chats(local.text))
        try:
            await asyncio.Event().wait()
        finally:
            await local.close()

    # the engine, in a worker

    async def _workers(self, listener: socket.socket) -> None:
        """One worker after another, until this task is cancelled."""
        from ai_engine.data.models import open_model

        with tempfile.TemporaryDirectory(prefix="ai-engine-") as folder:
            with contextlib.closing(await asyncio.to_thread(open_model, self.path)) as file:
                data = file.tokenizer()
            eos_ids, defaults = frozenset(data.eos_ids), data.defaults
            making = asyncio.create_task(asyncio.to_thread(app.build_text, data))  # while the worker loads
            del data, file
            lives = deaths = 0  # deaths in a row; a life that was ready and lasted forgives them
            while True:
                job = Job(
                    path=str(self.path),
                    socket=str(Path(folder) / f"worker-{lives}.sock"),
                    engine=self.engine,
                    serve=self.config,
                    eos_ids=eos_ids,
                )
                worker, started_s = WorkerProcess(job), time.monotonic()
                try:
                    text = await making
                    if lives == 0:
                        app.give_back()
                    report = await worker.report()
                    self._attach(report.trace)  # before the first of its events
                    client = await ServingClient.connect(job.socket, telemetry=self.telemetry)
                    try:
                        await self._one_life(client, report, listener, text, defaults, first=lives == 0)
                    finally:
                        self.relay.target = None
                        await client.close()
                except AiEngineError as error:
                    if lives == 0:  # it never worked: whoever started the server must hear why
                        raise
                    say(f"the worker could not start: {error.message}")
                finally:
                    self.relay.target, self.relay.reason = None, "the worker has ended and is being started again"
                    await worker.stop(self.at_once)
                lives += 1
                deaths = 1 if time.monotonic() - started_s > HEALTHY_LIFE_S else deaths + 1
                pause_s = RESTART_S[min(deaths, len(RESTART_S)) - 1]
                say(f"the worker ended with status {worker.process.returncode}; starting another in {pause_s:g} s")
                await asyncio.sleep(pause_s)

    async def _one_life(
        self,
        client: ServingClient,
        report: Report,
        listener: socket.socket,
        text: ModelText,
        defaults: Mapping[str, float],
        *,
        first: bool,
    ) -> None:
        """From ready until the worker is gone."""
        assert report.limits is not None
        assert report.memory is not None
        self.relay.target = client
        self.open_door(text, report.limits, defaults)
        if first:
            self._announce(listener, report.limits, report.memory, chats=answers_chats(text))
        else:
            say("the worker is ready again")
        await client.lost.wait()

    def _announce(self, listener: socket.socket, limits: Limits, memory: MemoryReport, *, chats: bool) -> None:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else shown}:{port}/v1"
        key = "" if self.keys.open else ' -H "authorization: Bearer $AI_ENGINE_API_KEY"'
        body: dict[str, object] = {"model": self.name, "temperature": 0}
        if chats:
            route = "chat/completions"
            body["messages"] = EXAMPLE_CHAT
        else:  # a base model continues texts
            route = "completions"
            body |= {"prompt": "The capital of France is", "max_tokens": 8}
        say(app.memory_line(memory, limits))
        if self.engine.approximate_head:
            say("approximate: greedy and top_k <= 32 look at half of the output head's bits first (--approximate-head)")
        say(f"traces: the last {app.format_bytes(self.config.trace_memory)} of steps and requests are kept")
        if self.keys.open:
            say("no key is set: anyone on this machine may send requests")
        say(f"console: {url.removesuffix('/v1')}/console shows it at work")
        say(f"ready: {url} serves {self.name}. Try:")
        say(f"  curl {url}/{route} -H 'content-type: application/json'{key} -d '{json.dumps(body)}'")


async def serve_all(servers: Sequence[Server], listeners: Sequence[socket.socket]) -> None:
    await asyncio.gather(*(server.serve(sockets=[at]) for server, at in zip(servers, listeners, strict=True)))


def http_server(gate: Gate) -> Server:
    return Server(
        uvicorn.Config(
            gate,
            http=bounded_http(connection_limit()),
            log_level="critical",  # malformed HTTP is a client's doing: it is answered, not logged
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            backlog=1024,
        )
    )


def answers_chats(text: ModelText) -> bool:
    """Whether the model's own file says how a conversation is written."""
    return text.template.describe().origin == "file"


def say(text: str) -> None:
    """A line for the person at the terminal."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error.strerror or error}", param="host") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = f"; is another server on port {port}? Use --port (or PORT=)" if port else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}{hint}", param="port") from None
    listener.listen(1024)
    listener.set_inheritable(False)
    return listener


def serve(model: str, engine: EngineConfig, config: ServeConfig, progress: Progress) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. Raises from the error tree when it cannot start."""
    path = app.find_model(model, offline=config.offline, progress=progress)
    return uvloop.run(Gateway(model, path, engine, config, progress).run())
