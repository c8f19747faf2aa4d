"""Compares GGUF files written by `oncurve export` with llama.cpp itself, which the package xllamacpp brings as a binary.

    python -m venv /tmp/llama && /tmp/llama/bin/pip install xllamacpp
    python bench/gguf_llama_cpp.py RUN /tmp/llama/bin/python --text FILE

1. Greedy text of ten prompts: llama.cpp with the float16 file, and the run's model here.
2. The run's weights quantised here and by llama.cpp's own quantiser (ggml_quantize_chunk), with the same types of tensors: the
   relative error of the weights, and the perplexity of a text, each computed by transformers from the dequantised weights.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from oncurve.models.loading.gguf_writer import ARCHITECTURES, write_gguf
from oncurve.operations.run_model import load_model
from oncurve.terminal.chat import Chat, ChatSettings

ASK = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.special = sys.argv[1], 1024, 1, False
server = xllamacpp.Server(params)
for prompt in json.loads(sys.argv[2]):
    reply = server.handle_completions({"prompt": prompt, "max_tokens": int(sys.argv[3]), "temperature": 0})
    print("REPLY" + json.dumps(reply["choices"][0]["text"]), flush=True)
"""
FIND_LIBRARY = "import glob, os, xllamacpp; print(glob.glob(os.path.dirname(xllamacpp.__file__) + '/*.so')[0])"
PROMPTS = ["12+34=", "123+456=", "7+8=", "99+1=", "305+207=", "46+489=", "81+95=", "500+500=", "3+9=", "78+21="]
GGML_TYPES = {gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K}


def greedy_texts(python: str, file: Path, prompts: list[str], tokens: int) -> list[str]:
    done = subprocess.run(
        [python, "-c", ASK, str(file), json.dumps(prompts), str(tokens)], capture_output=True, text=True, check=True
    )
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("REPLY")]


def quantise_by_ggml(library: ctypes.CDLL, values: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    """The bytes that llama.cpp's quantiser gives without an importance matrix."""
    rows, columns = values.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty(rows * columns // block * size, np.uint8)
    source = np.ascontiguousarray(values, np.float32)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk(
        ctypes.c_int(kind), source.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(columns), None,
    )  # fmt: skip
    return out.reshape(rows, -1)


@torch.no_grad()
def perplexity(model: Any, tokens: torch.Tensor) -> float:
    losses = [model(input_ids=part[None], labels=part[None]).loss for part in torch.split(tokens, 256) if len(part) > 1]
    return float(torch.stack(losses).mean().exp())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("python", help="Python of an environment with xllamacpp")
    parser.add_argument("--text", type=Path, help="text for the perplexity")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens for each prompt")
    parser.add_argument("--prompts", type=Path, help="a JSON list of prompts; default: ten sums")
    parser.add_argument("--characters", type=int, default=20_000, help="how much of the text")
    arguments = parser.parse_args()
    policy = load_model(arguments.run, Path("runs")).policy
    prompts = json.loads(arguments.prompts.read_text()) if arguments.prompts else PROMPTS
    library = ctypes.CDLL(
        subprocess.run([arguments.python, "-c", FIND_LIBRARY], capture_output=True, text=True, check=True).stdout.strip()
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(policy, file, "f16", "bench")
        theirs = greedy_texts(arguments.python, file, prompts, arguments.tokens)
        settings = ChatSettings(arguments.tokens, 0.0, None, 0)
        template, policy.tokenizer.chat_template = policy.tokenizer.chat_template, None  # plain completions in both
        ours = [Chat(policy, settings).ask(prompt, io.StringIO()) for prompt in prompts]
        policy.tokenizer.chat_template = template
        same = [a.removesuffix("<end>") == b for a, b in zip(theirs, ours, strict=True)]
        print(f"greedy text of {sum(same)} of {len(same)} prompts is the same")
        for a, b in zip(theirs, ours, strict=True):
            if a.removesuffix("<end>") != b:
                print(f"  llama.cpp {a!r}\n  here      {b!r}")
        if arguments.text is not None:
            compare_quantisers(policy, library, Path(folder), arguments.text.read_text()[: arguments.characters])


def compare_quantisers(policy: Any, library: ctypes.CDLL, folder: Path, text: str) -> None:
    policy.model.save_pretrained(folder / "base")
    tokens = torch.tensor(policy.tokenizer(text).input_ids)
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)

    print(f"perplexity of {len(tokens):,} tokens: {perplexity(load(), tokens):.4f} with the run's own weights")
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[policy.model.config.model_type]),
        policy.model.config.num_hidden_layers,
    )
    for kind in ("q8_0", "q4_k_m"):
        write_gguf(policy, folder / f"{kind}.gguf", kind, "bench")
        written = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / f"{kind}.gguf").tensors}
        models = {"here": load(), "llama.cpp": load()}
        errors: dict[str, list[float]] = {"here": [], "llama.cpp": []}
        for key, weight in load().named_parameters():
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if written[name].tensor_type not in GGML_TYPES:
                continue
            values = weight.detach().numpy()
            encoded = {
                "here": _encode(values, kind, written[name].tensor_type),
                "llama.cpp": quantise_by_ggml(library, values, written[name].tensor_type),
            }
            for who, data in encoded.items():
                back = gguf.quants.dequantize(data, written[name].tensor_type)
                errors[who].append(float(((back - values) ** 2).sum() / (values**2).sum()))
                models[who].get_parameter(key).data.copy_(torch.from_numpy(back))
        figures = {who: perplexity(model, tokens) for who, model in models.items()}
        ratio = figures["here"] / figures["llama.cpp"] - 1
        for who in models:
            print(f"{kind:7s} {who:10s} relative error {np.sqrt(np.mean(errors[who])):.5f}  perplexity {figures[who]:.4f}")
        print(f"{kind:7s} perplexity here is {100 * ratio:+.3f} % of llama.cpp's")


def _encode(values: np.ndarray[Any, Any], kind: str, tensor_type: Any) -> np.ndarray[Any, Any]:
    from oncurve.models.loading.gguf_writer import _quantise

    data: np.ndarray[Any, Any] = _quantise(gguf, kind, values, tensor_type)[0]
    return data


if __name__ == "__main__":
    main()
