"""The coordinator's command: flags -> Config -> serve, or one prompt. `python -m drover.coordinator MODEL …`.

Flags are read here and nowhere else; what is heavy is imported only once the flags are right.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from drover import logs, reports
from drover.coordinator.settings import CACHE_TYPES, DEFAULT_CONTEXT, DEFAULT_GRACE, DEFAULT_PORT, Config
from drover.errors import DroverError, ModelReplacedError
from drover.herd import sigterm_unwinds

INTERRUPTED = 130

log = structlog.get_logger()

if TYPE_CHECKING:
    from drover.coordinator.running import Running


def serve(
    model: Annotated[Path, typer.Argument(help="The model: a GGUF file, or the first of its parts.")],
    rpc: Annotated[str, typer.Option(help="Workers to use, host:port,host:port, in the order of the layers.")] = "",
    local: Annotated[
        str, typer.Option(help="Devices of this machine as further stages, e.g. cpu; the default without --rpc.")
    ] = "",
    tensor_split: Annotated[
        str, typer.Option("--tensor-split", "-ts", help="Shares of the devices, e.g. 3,1 [default: free memory].")
    ] = "",
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size", "-c", min=1, help=f"Context in tokens [default: the model's, to {DEFAULT_CONTEXT}]."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")] = DEFAULT_PORT,
    batch_size: Annotated[int, typer.Option(min=1, max=65536, help="Most tokens of a prompt in one step.")] = 512,
    parallel: Annotated[int, typer.Option(min=1, max=1024, help="Requests that run together; others wait.")] = 1,
    cache_type_k: Annotated[str, typer.Option(help=f"Type of the K cache: {', '.join(CACHE_TYPES)}.")] = "f16",
    cache_type_v: Annotated[str, typer.Option(help="Type of the V cache.")] = "f16",
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Threads of local devices.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients of the API must send.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds that key.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that answers may take at SIGTERM.")] = DEFAULT_GRACE,
    alias: Annotated[str | None, typer.Option(help="What the API calls the model [default: its file name].")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="What `drover load` reported of the model; another one ends with status 4.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="console or json.")] = "console",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Continue this text and end; no API.")] = None,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=1, help="With --prompt: tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="With --prompt; 0 takes the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="With --prompt; 0 is off.")] = 40,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="With --prompt; 1 is off.")] = 0.95,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="With --prompt; 0 is off.")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option(min=0.01, help="With --prompt; 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="With --prompt: makes the text repeatable.")] = None,
) -> None:
    """Run a GGUF model across workers and offer it as an OpenAI-compatible API."""
    if log_format not in ("console", "json"):
        raise typer.BadParameter("console or json", param_hint="--log-format")
    logs.configure("json" if log_format == "json" else "console", verbose)
    config = Config(
        model=model,
        rpc=words(rpc),
        local=words(local),
        tensor_split=shares(tensor_split),
        context=ctx_size,
        host=host,
        port=port,
        batch_size=batch_size,
        parallel=parallel,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        threads=threads,
        api_key=key_of(api_key, api_key_file),
        grace=grace,
        alias=alias,
        verbose=verbose,
        fingerprint=fingerprint,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
    )
    run(config)


def run(config: Config) -> None:
    """Serve until told to stop, or answer the prompt; then show what each stage did."""
    from drover.coordinator import display
    from drover.coordinator.assembly import assemble
    from drover.coordinator.lifecycle import Lifecycle

    if config.prompt is None:
        _listen(config)
        return
    with sigterm_unwinds(), assemble(config, Lifecycle()) as running:
        display.show_placement(running.rows, f"{config.model_name}, context {running.engine.context}")
        _answer(config, config.prompt, running)
        display.show_speed(running.rows, running.meters)


def main() -> int:
    """Run the command; an error of ours is one line and exit status 1, or 4 for another model than was proven."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve)
    try:
        app()
    except DroverError as error:
        print(f"drover: error: {error}", file=sys.stderr)
        return reports.REPLACED if isinstance(error, ModelReplacedError) else reports.FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _listen(config: Config) -> None:
    """Open the port, then load the model; answer requests until told to stop."""
    from drover.coordinator import display, http_server
    from drover.coordinator.assembly import assemble
    from drover.coordinator.lifecycle import Lifecycle
    from drover.coordinator.routes import Api, create_app
    from drover.coordinator.status import Status

    lifecycle = Lifecycle()
    status = Status(config, lifecycle)
    api = Api(config.model_name, status)
    app = create_app(api, config.api_key)
    with (
        sigterm_unwinds(status=0),
        http_server.opened(app, api, config.host, config.port, config.grace) as (server, url),
        assemble(config, lifecycle) as running,
    ):
        display.show_placement(running.rows, f"{config.model_name}, context {running.engine.context}")
        status.running = running
        api.open(running.engine, running.tokenizer, running.chat)
        log.info("API is open", url=url)
        server.wait()
        display.show_speed(running.rows, running.meters)


def _answer(config: Config, prompt: str, running: "Running") -> None:
    """Print the prompt and what the model makes of it, as it comes."""
    from drover.coordinator.one_prompt import stream

    sys.stdout.write(prompt)
    for text in stream(config, prompt, running.engine, running.tokenizer):
        sys.stdout.write(text)
        sys.stdout.flush()
    print(flush=True)


def words(text: str) -> tuple[str, ...]:
    """The parts of "a,b"; none of an empty text."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def key_of(key: str | None, file: Path | None) -> str | None:
    """The API key, given by itself or in a file."""
    if file is None:
        return key
    if key is not None:
        raise typer.BadParameter("give --api-key or --api-key-file, not both", param_hint="--api-key-file")
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DroverError(f"--api-key-file {file}: cannot be read: {error}") from None
    if not text:
        raise DroverError(f"--api-key-file {file}: the file is empty")
    return text


def shares(text: str) -> tuple[float, ...] | None:
    """The numbers of "3,1"; None of an empty text."""
    try:
        return tuple(float(word) for word in words(text)) or None
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 3,1", param_hint="--tensor-split") from None


if __name__ == "__main__":
    sys.exit(main())
