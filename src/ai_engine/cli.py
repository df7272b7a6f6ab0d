"""The command line. Owns words and options; all work is done through app.py and the layers behind it.

Nothing heavy is imported before it is needed: `--help` answers in a tenth of a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from ai_engine.bench.options import add_bench, run_bench
from ai_engine.config import EngineConfig, ServeConfig, check_engine, check_serve, fields_of
from ai_engine.observe.command import add_slo, add_trace, run_slo, run_trace
from ai_engine.ports.errors import AiEngineError, ContextLengthExceeded
from ai_engine.progress import ProgressBar
from ai_engine.version import __version__

if TYPE_CHECKING:
    import msgspec

    from ai_engine.llm import LLM

EPILOG = """examples:
  ai-engine serve smollm2                          serve the small packaged model on 127.0.0.1:8000
  ai-engine serve ./my-model.gguf --threads 4      serve a local file (GGUF file or safetensors folder)
  ai-engine serve org/name                         fetch from the hub, then serve
  ai-engine generate smollm2 "Once upon a time"    continue a text in this process
  ai-engine chat smollm2                           talk in the terminal
  ai-engine models list                            what can be served by name, and what is on disk
  ai-engine keys add keys.json team-a --tokens-per-minute 60000
                                                   make a key; then: ai-engine serve smollm2 --keys keys.json
  ai-engine inspect smollm2                        architecture, tensors, memory it will need
  ai-engine graph smollm2 --passes                 the graph after each compiler pass, and the program
  ai-engine trace show 4bf92f3577b34da6a3ce929d0e0e4736   where a request's time went, down to the single op
  ai-engine bench machine                          what this machine can do; kernels, model, serve, compare

Errors say what to change. Ctrl-C stops cleanly. Docs: README.md, docs/trace.md.
"""


def size_bytes(text: str) -> int:
    """'512M', '2G', '1.5GiB' or plain bytes."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    try:
        return int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):  # OverflowError: infinity
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes or 512M, 2G") from None


def add_config(parser: argparse.ArgumentParser, struct: type[msgspec.Struct], title: str) -> None:
    """One option per field of the config struct, default and help included."""
    group = parser.add_argument_group(title)
    for name, plain, default, text, extra in fields_of(struct):
        flag = "--" + name.replace("_", "-")
        shown = text if default in ("", (), False, True) else f"{text} (default {default})"
        options: dict[str, Any] = {"dest": name, "default": default, "help": shown.replace("%", "%%")}
        if plain is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif extra.get("many"):
            group.add_argument(flag, action="append", metavar="TEXT", **{**options, "default": None})
        elif get_origin(plain) is Literal:
            group.add_argument(flag, choices=get_args(plain), **options)
        elif name.endswith(("_memory", "_bytes")):
            group.add_argument(flag, type=size_bytes, metavar="SIZE", **options)
        else:
            group.add_argument(flag, type=plain, metavar=plain.__name__.upper(), **options)


def config_from(args: argparse.Namespace, struct: type[msgspec.Struct]) -> Any:
    """The config struct with what the command line says."""
    values: dict[str, Any] = {}
    for name, _, default, _, extra in fields_of(struct):
        value = getattr(args, name, default)
        values[name] = tuple(value or ()) if extra.get("many") else value
    return struct(**values)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ai-engine",
        description="Serve and look through language models on a plain CPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ai-engine {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    model_help = "packaged name (see `models list`), path to a .gguf file or safetensors folder, or hub id org/name"

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(run=run)
        return sub

    serve = command("serve", run_serve, "serve a model with an OpenAI-compatible API")
    serve.add_argument("model", help=model_help)
    add_config(serve, ServeConfig, "server")
    add_config(serve, EngineConfig, "engine")

    generate = command("generate", run_generate, "continue a prompt and print the text as it comes")
    generate.add_argument("model", help=model_help)
    generate.add_argument("prompt", nargs="?", help="the text to continue; read from standard input when absent")
    generate.add_argument("--chat", action="store_true", help="send the prompt as a user message through the template")
    add_sampling(generate)
    add_config(generate, EngineConfig, "engine")

    chat = command("chat", run_chat, "talk with a model in the terminal")
    chat.add_argument("model", help=model_help)
    chat.add_argument("--system", help="system message")
    add_sampling(chat)
    add_config(chat, EngineConfig, "engine")

    models = command("models", run_models, "list models, or fetch one")
    what = models.add_subparsers(dest="what", metavar="list|pull", required=True)
    what.add_parser("list", help="packaged models and what is on disk")
    pull = what.add_parser("pull", help="fetch a model and check its digest")
    pull.add_argument("model", help=model_help)
    pull.add_argument("--verify", action="store_true", help="check the digest of a file that is already here")

    keys = command("keys", run_keys, "make, list, remove or check API keys in a file for `serve --keys FILE`")
    add_keys(keys.add_subparsers(dest="what", metavar="add|list|remove|check", required=True))

    inspect = command("inspect", run_inspect, "show what a model file holds and what it will need")
    inspect.add_argument("model", help=model_help)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    add_config(inspect, EngineConfig, "engine")

    graph = command("graph", run_graph, "print the model's graph and the program that runs")
    graph.add_argument("model", help=model_help)
    graph.add_argument("--passes", action="store_true", help="print the graph after every pass, not only the last")
    graph.add_argument(
        "--layers", type=int, default=0, metavar="N", help="build only the first N layers, to read more easily"
    )
    add_config(graph, EngineConfig, "engine")

    add_bench(command("bench", run_bench, "measure the machine, kernels, a model, a server, or beside llama.cpp"))
    add_slo(command("slo", run_slo, "judge requests by a file of service level objectives"))
    add_trace(command("trace", run_trace, "show where the time of a request went, down to the single op"))
    return parser


def add_keys(what: Any) -> None:
    """The options of ``keys``; their names are the file's fields."""
    add = what.add_parser("add", help="make a key, write its digest and its limits, print the key once")
    for name, text in (("list", "who has a key, with which limits"), ("check", "find what is wrong with the file")):
        what.add_parser(name, help=text).add_argument("file", help="keys file (JSON)")
    remove = what.add_parser("remove", help="take a key out; requests that run are not touched")
    for parser, name in ((add, "whose key it is: limits and cached prefixes are by name"), (remove, "name or digest")):
        parser.add_argument("file", help="keys file (JSON)")
        parser.add_argument("name", help=name)
    for flag, kind, text in (
        ("requests-per-minute", int, "requests in a minute"),
        ("tokens-per-minute", int, "prompt and output tokens in a minute"),
        ("concurrent", int, "requests at once"),
        ("priority", int, "lower runs first"),
        ("weight", float, "share against other names (1)"),
        ("shared-prefix", str, "share cached prefixes with keys that have the same text here"),
        ("expires", str, "last moment, such as 2027-01-31T00:00:00Z"),
    ):
        add.add_argument(f"--{flag}", type=kind, metavar=kind.__name__.upper(), help=text)
    add.add_argument("--model", action="append", dest="models", metavar="ID", help="only this model; repeatable")
    add.add_argument("--strict", action="store_true", default=None, help="refuse unknown and unused fields")
    add.add_argument("--admin", action="store_true", default=None, help="may read everybody's traces and the metrics")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="INT", help="tokens to generate (default 256)")
    group.add_argument(
        "--temperature", type=float, metavar="FLOAT", help="0 is greedy (default: the model's own, or 1)"
    )
    group.add_argument("--top-p", type=float, metavar="FLOAT", help="nucleus sampling")
    group.add_argument("--top-k", type=int, metavar="INT", help="keep the k most likely; 0: off")
    group.add_argument("--min-p", type=float, metavar="FLOAT", help="drop tokens below this share of the best")
    group.add_argument("--seed", type=int, metavar="INT", help="same seed, same text")
    group.add_argument("--stop", action="append", metavar="TEXT", default=[], help="stop before this text; repeatable")


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def run_serve(args: argparse.Namespace) -> int:
    from ai_engine.gateway import serve as run

    serve = config_from(args, ServeConfig)
    if not serve.api_key and os.environ.get("AI_ENGINE_API_KEY"):
        import msgspec

        serve = msgspec.structs.replace(serve, api_key=os.environ["AI_ENGINE_API_KEY"])
    return run(args.model, check_engine(config_from(args, EngineConfig)), check_serve(serve), ProgressBar())


def open_llm(args: argparse.Namespace) -> LLM:
    from ai_engine.llm import LLM

    return LLM(args.model, config=check_engine(config_from(args, EngineConfig)), progress=ProgressBar())


def run_generate(args: argparse.Namespace) -> int:
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    with open_llm(args) as llm:
        messages = [{"role": "user", "content": prompt}]
        stream = (
            llm.stream_chat(messages, stop=args.stop, **sampling_from(args))
            if args.chat
            else llm.stream(prompt, stop=args.stop, **sampling_from(args))
        )
        for text in stream:
            print(text, end="", flush=True)
        print()
    return 0


def run_chat(args: argparse.Namespace) -> int:
    messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
    with open_llm(args) as llm:
        if sys.stdin.isatty():
            print("Type a message; an empty line or Ctrl-D ends. Ctrl-C stops an answer.")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return 0
            if not line.strip():
                return 0
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": chat_turn(llm, messages, args)})


def chat_turn(llm: LLM, messages: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Print one answer and return it. Where the conversation has outgrown the context, its oldest turns go."""
    answer = ""
    while True:
        try:
            for text in llm.stream_chat(messages, stop=args.stop, **sampling_from(args)):
                answer += text
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except ContextLengthExceeded:
            first = 1 if messages[0]["role"] == "system" else 0
            if len(messages) - first < 3:  # the message alone is too long
                raise
            del messages[first : first + 2]
            print("[the oldest turn is forgotten: the context is full]", file=sys.stderr)
            continue
        print()
        return answer


def run_models(args: argparse.Namespace) -> int:
    from ai_engine import app

    if args.what == "list":
        print(app.models_table())
    else:
        print(app.pull(args.model, ProgressBar(), verify=args.verify))
    return 0


def run_keys(args: argparse.Namespace) -> int:
    import time
    from pathlib import Path

    from ai_engine.api import keys

    path = Path(args.file)
    if args.what == "add":
        print(keys.add_key(path, {name: getattr(args, name) for name in keys.SETTINGS}))
        print(f"this is the only time the key is shown; {path} has its digest", file=sys.stderr)
    elif args.what == "remove":
        gone = keys.remove_keys(path, args.name)
        print(f"{len(gone)} of {args.name} removed; a server that runs sees it within a second or two")
    elif args.what == "list":
        print(keys.keys_table(keys.read_keys(path), time.time()))
    else:
        print(f"{path}: {len(keys.read_keys(path))} keys, nothing is wrong")
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    from ai_engine import app

    config = check_engine(config_from(args, EngineConfig))
    print(app.inspect_model(args.model, config, ProgressBar(), tensors=args.tensors, as_json=args.json))
    return 0


def run_graph(args: argparse.Namespace) -> int:
    from ai_engine import app

    config = check_engine(config_from(args, EngineConfig))
    print(app.graph_text(args.model, config, ProgressBar(), every_pass=args.passes, layers=args.layers))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error that the message explains, 2 wrong usage, 130 stopped by Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except AiEngineError as error:
        print(f"ai-engine: {error.message}", file=sys.stderr)
        return 2 if error.code == "config_error" else 1
    except KeyboardInterrupt:
        print("\nai-engine: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
