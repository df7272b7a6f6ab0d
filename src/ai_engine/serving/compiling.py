"""Constraints compiled beside the event loop, in a few threads, each within a deadline; the queue for them is bounded
in length and time.

A compiler cannot be interrupted: one that passes its deadline keeps its thread until its own limits end it, and its
request has been refused by then. Does not own the compiler (ports.grammar.Grammars).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ai_engine.ports.errors import InvalidJsonSchema, InvalidValue, Overloaded, UnsupportedParameter
from ai_engine.ports.grammar import Grammar, Grammars
from ai_engine.ports.serving import GenerateRequest
from ai_engine.serving.config import ServingConfig


class Compilers:
    """``grammars`` None: constraints are refused."""

    def __init__(self, grammars: Grammars | None, config: ServingConfig) -> None:
        self._grammars, self._config = grammars, config
        self._threads = ThreadPoolExecutor(config.compile_threads, thread_name_prefix="compile-grammar")
        self._waiting = 0

    @property
    def nbytes(self) -> int:
        return 0 if self._grammars is None else self._grammars.nbytes

    async def compile(self, request: GenerateRequest) -> Grammar | None:
        """The request's grammar; None when it has no constraint. Raises InvalidJsonSchema, UnsupportedParameter,
        Overloaded, or InvalidValue when ``max_tokens`` cannot hold the shortest answer."""
        constraint, config = request.constraint, self._config
        if constraint is None:
            return None
        if self._grammars is None:
            raise UnsupportedParameter(
                f"{constraint.param}: this server enforces no grammars. Fix: leave it out.", param=constraint.param
            )
        if self._waiting >= config.max_compiling:
            raise Overloaded(
                f"{self._waiting} schemas or grammars are being compiled (limit {config.max_compiling}); try again",
                retry_after_s=config.min_retry_after_s,
            )
        begun, loop, compile_one = asyncio.Event(), asyncio.get_running_loop(), self._grammars.compile

        def work() -> Grammar:
            loop.call_soon_threadsafe(begun.set)
            return compile_one(constraint)

        self._waiting += 1
        made = loop.run_in_executor(self._threads, work)
        made.add_done_callback(self._compiled)
        try:
            await asyncio.wait_for(begun.wait(), config.compile_deadline_s)
        except TimeoutError:
            made.cancel()
            raise Overloaded(
                f"no thread was free to compile {constraint.param} for {config.compile_deadline_s:g} s; try again",
                retry_after_s=config.min_retry_after_s,
            ) from None
        try:
            grammar = await asyncio.wait_for(asyncio.shield(made), config.compile_deadline_s)
        except TimeoutError:
            raise InvalidJsonSchema(
                f"{constraint.param}: not compiled within {config.compile_deadline_s:g} s. Fix: send a smaller one.",
                param=constraint.param,
            ) from None
        if grammar.min_tokens > request.params.max_tokens:
            raise InvalidValue(
                f"max_tokens: found {request.params.max_tokens}, expected at least {grammar.min_tokens}: the smallest "
                f"answer known to match {constraint.param} takes that many. Fix: raise it.",
                param="max_tokens",
            )
        return grammar

    def _compiled(self, work: asyncio.Future[Grammar]) -> None:
        self._waiting -= 1
        if not work.cancelled():
            work.exception()  # somebody else may have been told already

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
