"""Speed of `oncurve serve`: concurrent clients over real HTTP, each requesting a completion; tokens/s and time to first token.

The server runs in its own process, the clients in others. Prompts are token ids, and the model's end tokens are removed, so
that every completion has its full length. Each case runs twice and the second run is reported; the time to first token is the
median over the clients. Uses CUDA graphs, or plain torch with `--torch`.

    python bench/serve.py path/to/model
    python bench/serve.py path/to/model --torch --new-tokens 64
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROCESSES = 8
PROMPT = 128
NAME = "served"


@dataclass(frozen=True)
class Case:
    clients: int
    stream: bool = True
    top_p: float = 1.0

    @property
    def name(self) -> str:
        how = "streamed" if self.stream else "whole"
        return f"{self.clients} {how}" + (f", top_p {self.top_p}" if self.top_p < 1 else "")


CASES = [Case(1), Case(1, top_p=0.9), Case(8), Case(8, top_p=0.9), Case(64), Case(64, top_p=0.9), Case(64, stream=False)]


@dataclass(frozen=True)
class Answer:
    began: float
    first: float
    ended: float
    tokens: int


def ask(port: int, case: Case, seed: int, new_tokens: int) -> Answer:
    dice = random.Random(seed)
    body: dict[str, Any] = {
        "model": NAME, "prompt": [dice.randrange(100, 10_000) for _ in range(PROMPT)], "max_tokens": new_tokens,
        "seed": seed, "temperature": 0.8, "top_p": case.top_p, "stream": case.stream,
    }  # fmt: skip
    if case.stream:
        body["stream_options"] = {"include_usage": True}
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {answer.read().decode()}")
    first, last = 0.0, b""
    if case.stream:
        for line in answer:
            if line.startswith(b"data: {"):
                first, last = first or time.monotonic(), line
    else:
        last = b"data: " + answer.read()
        first = time.monotonic()
    connection.close()
    return Answer(began, first, time.monotonic(), json.loads(last[6:])["usage"]["completion_tokens"])


def ask_some(port: int, case: Case, seeds: list[int], new_tokens: int) -> list[Answer]:
    with ThreadPoolExecutor(max(1, len(seeds))) as threads:
        return list(threads.map(lambda seed: ask(port, case, seed, new_tokens), seeds))


def measure(pool: ProcessPoolExecutor, port: int, case: Case, new_tokens: int) -> dict[str, Any]:
    for _ in range(2):
        parts = [list(range(i, case.clients, PROCESSES)) for i in range(PROCESSES)]
        pending = [pool.submit(ask_some, port, case, part, new_tokens) for part in parts if part]
        answers = [answer for future in pending for answer in future.result()]
    took = max(a.ended for a in answers) - min(a.began for a in answers)
    tokens = sum(a.tokens for a in answers)
    assert tokens == case.clients * new_tokens
    first = statistics.median(a.first - a.began for a in answers)
    return {"case": case.name, "clients": case.clients, "new_tokens": new_tokens, "seconds": round(took, 3),
            "tokens_per_second": round(tokens / took, 1), "first_ms": round(first * 1000, 1)}  # fmt: skip


def serve(model: str, dtype: str, slots: int, by_torch: bool) -> None:
    """The server process: prints its port, and exits when its input closes."""
    from oncurve.engines.native.session import open_session, torch_session
    from oncurve.local_http import listen
    from oncurve.models.loading.load import load_policy
    from oncurve.recipe.schema.model import Model
    from oncurve.serve.server import CompletionServer, EngineThread, ServedModel, stop_when_stdin_closes

    policy = load_policy(Model.model_validate({"source": model, "dtype": dtype}), alphabet=None, seed=0)
    policy.eos_ids = ()
    session = torch_session(policy, slots, 1024) if by_torch else open_session(policy, slots, 1024)
    with listen("127.0.0.1", 0) as listening:
        worker = EngineThread(session)
        server = CompletionServer(ServedModel(NAME, policy, worker))
        threading.Thread(target=stop_when_stdin_closes, args=(server,), daemon=True).start()
        print(json.dumps({"port": listening.getsockname()[1], "session": type(session).__name__}), flush=True)
        asyncio.run(server.serve(sockets=[listening]))
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--torch", action="store_true", help="decode with plain torch")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16",
        help="bfloat16 is how `oncurve serve` loads a model on a GPU",
    )
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--cases", type=int, nargs="*", help="case numbers; default: all")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        serve(args.model, args.dtype, args.slots, args.torch)
        return
    command = [sys.executable, __file__, args.model, "--server", "--slots", str(args.slots), "--dtype", args.dtype]
    command += ["--torch"] * args.torch
    began = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        results: dict[str, Any] = {"session": ready["session"], "dtype": args.dtype, "slots": args.slots}
        results["start_s"] = round(time.monotonic() - began, 1)
        print(f"{ready['session']}, {args.slots} slots, ready after {results['start_s']:.1f} s")
        with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
            cases = CASES if args.cases is None else [CASES[i] for i in args.cases]
            results["cases"] = []
            for case in cases:
                result = measure(pool, ready["port"], case, args.new_tokens)
                results["cases"].append(result)
                print(
                    f"{result['case']:>24}  {result['tokens_per_second']:>9} tokens/s  "
                    f"first token after {result['first_ms']} ms"
                )
                if args.out is not None:
                    args.out.write_text(json.dumps(results, indent=1))
        server.stdin.close()


if __name__ == "__main__":
    main()
