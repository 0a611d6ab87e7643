"""`jaxkv bench serve`: load on any OpenAI-compatible server, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxkv.bench.report import details, report_lines
from jaxkv.bench.serving import Benchmark, run
from jaxkv.core.errors import JaxkvError


def bench_serve(
    base_url: Annotated[str | None, typer.Option(help="In place of --host and --port.")] = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    endpoint: Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions.")] = "/v1/completions",
    model: Annotated[str | None, typer.Option(help="Asked from /v1/models if not given.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 96,
    input_len: Annotated[
        int, typer.Option("--random-input-len", "--input-len", min=1, help="Tokens per prompt, exactly.")
    ] = 128,
    output_len: Annotated[
        int, typer.Option("--random-output-len", "--output-len", min=1, help="Most tokens per answer.")
    ] = 64,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second, arriving at random (Poisson); inf = all at once.")
    ] = float("inf"),
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at most.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate to the full length.")] = False,
    seed: Annotated[int, typer.Option(help="Draws the prompts and the arrivals.")] = 0,
    vocab_size: Annotated[int, typer.Option(min=2, help="Prompt token ids are drawn below this.")] = 30_000,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the numbers as JSON, too.")] = False,
    result_filename: Annotated[Path | None, typer.Option(help="Where to; a name with the date if not given.")] = None,
) -> None:
    """Measure an OpenAI-compatible server and print vLLM's report."""
    if not request_rate > 0:
        raise typer.BadParameter(f"--request-rate is {request_rate:g}: it must be above 0")
    benchmark = Benchmark(
        base_url=base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}",
        endpoint=endpoint,
        model=model,
        api_key=api_key,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        ignore_eos=ignore_eos,
        seed=seed,
        # Low ids are often special tokens.
        vocab=(min(300, vocab_size // 2), vocab_size),
    )
    result, outcomes = run(benchmark)
    print("\n".join(report_lines(result)))
    if save_result or result_filename is not None:
        name = f"{result['endpoint_type']}-{result['model_id'].replace('/', '-')}-{result['date']}.json"
        path = result_filename or Path(name)
        try:
            path.write_text(json.dumps(result | details(outcomes)) + "\n", encoding="utf-8")
        except OSError as error:
            raise JaxkvError(f"cannot write {path}: {error.strerror}") from error
        print(f"saved to {path}")
