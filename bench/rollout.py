"""Sampling speed on a GPU: Oncurve, vLLM and transformers' own `generate`, one after the other.

The model is a Qwen3-0.6B with random weights in bfloat16. There are four workloads: three of fixed length, and one in which
completions end at stop tokens (a two-hundredth of the vocabulary, so lengths are geometric with mean 200, limit 2,048).
Log-probs of the sampled tokens are on. Each peer runs in its own process. Figures are medians after a warm-up, and the table
gives the number of runs: 5 of fixed length; of the mixed one 3 for Oncurve and 1 for vLLM, which takes 13 s; 2 for
transformers, on the first workload only and with 64 tokens each, because a token takes it 0.1 s. Results are written after
each peer. All three take about 330 s, of which vLLM's start is 85.

    python bench/rollout.py --against vllm,transformers
    python bench/rollout.py --profile          time of a decode step, kernel by kernel
    python bench/rollout.py --shape gemma3-1b --against modules,vllm --out gemma3.json
    python bench/rollout.py --works 4,5 --against vllm --repeats 2 --no-second-start --out long.json

With --shape another model of random weights takes its place, and the workload is 32 × 8 of 256 + 512 tokens. The peer
`modules` is Oncurve without its fused step: the model's own modules decode. The peer `fp8` is Oncurve with an FP8 KV cache.
Workloads 4 and 5 have long completions, and are measured only if --works names them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from reporting import commit

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "rollout.json"
BEGAN = "ONCURVE_BENCH_BEGAN"
"""The environment's word for when a peer's process was started."""
NONE = "none"
"""No work but the first token."""
VOCABULARY = 151_936
SHAPE = "qwen3-0.6b"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    SHAPE: ("Qwen3Config", {
        "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    }),
    "qwen3-4b": ("Qwen3Config", {
        "vocab_size": VOCABULARY, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    }),
    "llama-1b": ("LlamaConfig", {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    }),
    "gemma3-1b": ("Gemma3TextConfig", {
        "vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "head_dim": 256,
        "num_attention_heads": 4, "num_key_value_heads": 1,
    }),
    "olmo2-1b": ("Olmo2Config", {
        "vocab_size": 100_352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16,
    }),
    "qwen3.5-0.8b": ("Qwen3_5TextConfig", {
        "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6, "tie_word_embeddings": True,
    }),
    "lfm2-1.2b": ("Lfm2Config", {
        "vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 12_288, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    }),
    "moe-3b-a1b": ("Qwen3MoeConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": True,
    }),
    "gpt-oss-20b-layers": ("GptOssConfig", {
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 6, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "max_position_embeddings": 131_072,
    }),
    "mla-2b": ("DeepseekV2Config", {
        "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944, "num_hidden_layers": 7,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    }),
}  # fmt: skip
"""The config class and the sizes of each model. They are true sizes, except that `moe-3b-a1b` is no released model (3.0 billion
parameters, 1.2 of them active), and that two models have fewer layers: gpt-oss-20b 6 of 24 (6.1 billion parameters) and
DeepSeek-V2-Lite 7 of 27 (4.0 billion, 1.0 active)."""
DEVICE = "cuda"
POSITIONS = 8704
"""The longest sequence of any workload, and some more."""


@dataclass(frozen=True)
class Work:
    """A number of prompts × completions. ``mean`` is set if completions end at stop tokens."""

    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    mean: int | None = None

    @property
    def name(self) -> str:
        lengths = f"{self.new_tokens}" if self.mean is None else f"mean {self.mean}, limit {self.new_tokens}"
        return f"{self.prompts} × {self.group_size}, {self.prompt_tokens} + {lengths}"

    @property
    def ends(self) -> tuple[int, ...]:
        return () if self.mean is None else tuple(range(1000, 1000 + VOCABULARY // self.mean))

    def token_ids(self, seed: int) -> list[list[int]]:
        dice = random.Random(seed)
        return [[dice.randrange(10, 1000) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]


MIXED_RUNS = {"oncurve": 3, "vllm": 1}
"""How often a workload of mixed or of great length is measured at most; twice by other peers."""
LONG = 4096
TRANSFORMERS_RUNS, TRANSFORMERS_TOKENS = 2, 64
WORKS = [Work(32, 8, 128, 256), Work(32, 8, 512, 1024), Work(8, 64, 256, 512), Work(128, 8, 128, 2048, mean=200)]
LONG_WORKS = [Work(16, 8, 256, LONG), Work(64, 8, 256, 8192, mean=800)]
SHAPE_WORKS = [Work(32, 8, 256, 512)]


def make_model(shape: str) -> Any:
    import torch
    import transformers

    kind, sizes = SHAPES[shape]
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": POSITIONS, "eos_token_id": 1, "pad_token_id": 2, "bos_token_id": 0} | sizes
    config = getattr(transformers, kind)(**sizes)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def make_engine(shape: str) -> Any:
    from random_models import make_tokenizer

    from oncurve.engines.native.engine import NativeEngine
    from oncurve.models.policy import Policy
    from oncurve.recipe.schema.sections import Engine

    return NativeEngine(Policy(make_model(shape), make_tokenizer(SHAPES[shape][1]["vocab_size"])), Engine())


class Oncurve:
    """``sample`` as a training step calls it: text in, groups with text and log-probs out."""

    def __init__(self, shape: str = SHAPE) -> None:
        self.engine = make_engine(shape)
        self.step = 0

    def warm(self, work: Work) -> None:
        """The work itself: what it needs is captured on the way."""
        self.run(work)

    def run(self, work: Work) -> int:
        from oncurve.engines.base import SampleKey
        from oncurve.recipe.schema.sections import Sampling
        from oncurve.records import Prompt

        self.step += 1
        self.engine.policy.eos_ids = work.ends
        texts = [" ".join(f"w{i}" for i in ids) for ids in work.token_ids(self.step)]
        prompts = [Prompt(id=f"p{i}", text=text) for i, text in enumerate(texts)]
        groups = self.engine.sample(prompts, work.group_size, Sampling(max_new_tokens=work.new_tokens), SampleKey(0, self.step))
        return sum(len(c.token_ids) for g in groups for c in g.completions)


class Modules(Oncurve):
    """Oncurve without its fused step."""

    def __init__(self, shape: str) -> None:
        super().__init__(shape)
        self.engine.policy.fast_backbone = self.engine.policy.fused_weights = None


class Fp8(Oncurve):
    """Oncurve with an FP8 KV cache."""

    def __init__(self, shape: str) -> None:
        super().__init__(shape)
        self.engine.settings = self.engine.settings.model_copy(update={"kv_dtype": "fp8"})


class Vllm:
    """vLLM in-process, as in TRL's colocated mode, without detokenising."""

    def __init__(self, shape: str) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
        folder = tempfile.mkdtemp()
        make_model(shape).save_pretrained(folder)
        from vllm import LLM

        self.llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.6, max_model_len=POSITIONS,
            max_num_seqs=512, seed=0,
        )  # fmt: skip
        self.step = 0

    def warm(self, work: Work) -> None:
        """A little work: all was captured at the start."""
        self.run(Work(4, 8, work.prompt_tokens, 16))

    def run(self, work: Work) -> int:
        from vllm import SamplingParams

        self.step += 1
        how = SamplingParams(
            n=work.group_size, temperature=1.0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False, logprobs=0,
            stop_token_ids=list(work.ends),
        )  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in work.token_ids(self.step)]
        found = self.llm.generate(prompts, how, use_tqdm=False)
        return sum(len(o.token_ids) for r in found for o in r.outputs)


class Transformers:
    """`generate` with its cache, all completions at once."""

    def __init__(self, shape: str) -> None:
        self.model = make_model(shape).eval()

    def warm(self, work: Work) -> None:
        self.run(Work(4, 8, work.prompt_tokens, 16))

    def run(self, work: Work) -> int:
        import torch

        ids = torch.tensor(work.token_ids(0), device=DEVICE).repeat_interleave(work.group_size, 0)
        new = min(work.new_tokens, TRANSFORMERS_TOKENS)  # every token takes about the same time, so a short text is enough
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new,
            pad_token_id=2, output_logits=False,
        )  # fmt: skip
        return int(out[:, ids.shape[1] :].numel())


PEERS: dict[str, Any] = {"oncurve": Oncurve, "modules": Modules, "fp8": Fp8, "vllm": Vllm, "transformers": Transformers}


def runs(peer: str, work: Work, repeats: int) -> int:
    """How many times a workload is measured."""
    if peer == "transformers":
        return min(repeats, TRANSFORMERS_RUNS)
    is_short = work.mean is None and work.new_tokens < LONG
    return repeats if is_short else min(repeats, MIXED_RUNS.get(peer, 2))


def measure(peer: str, shape: str, repeats: int, works: list[Work], out: Path) -> None:
    """Tokens per second by workload after a warm-up, and seconds from the start of the process to its first token."""
    began = float(os.environ.get(BEGAN, time.time()))
    import torch

    sampler = PEERS[peer](shape)
    sampler.run(Work(1, 1, 16, 1))
    found: dict[str, Any] = {"first_token_s": round(time.time() - began, 1), "versions": versions(), "rates": {}}
    print(f"{peer}: first token after {found['first_token_s']} s", flush=True)
    out.write_text(json.dumps(found))
    for work in works:
        sampler.warm(work)
        rates = []
        for _ in range(runs(peer, work, repeats)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            tokens = sampler.run(work)
            torch.cuda.synchronize()
            rates.append(tokens / (time.perf_counter() - begin))
        found["rates"][work.name] = [round(r) for r in rates]
        found["seconds"] = round(time.time() - began)
        print(f"{peer}: {work.name}: {statistics.median(rates):,.0f} tokens/s {[round(r) for r in rates]}", flush=True)
        out.write_text(json.dumps(found))


def in_own_process(peer: str, said: argparse.Namespace, works: str) -> dict[str, Any] | None:
    """What a peer measured before its process ended, successfully or not; None if nothing."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, __file__, "--worker", peer, "--repeats", str(said.repeats)]
        command += ["--shape", said.shape, "--out", out.name]
        environment = dict(os.environ) | {BEGAN: str(time.time())}
        if peer == "vllm" and said.vllm_path:
            environment["PYTHONPATH"] = said.vllm_path + os.pathsep + environment.get("PYTHONPATH", "")
        done = subprocess.run([*command, "--works", works], check=False, env=environment)
        if done.returncode:
            print(f"{peer}: process exited with code {done.returncode}", flush=True)
        text = Path(out.name).read_text()
        return json.loads(text) if text else None


def profile(work: Work, sampler: Oncurve, tokens: int = 40) -> list[tuple[str, float, int]]:
    """(kernel, microseconds, launches) of one decode step in the middle of a workload."""
    import torch
    from torch.profiler import ProfilerActivity

    sampler.run(work)
    gpu = sampler.engine.graph_decoder
    seen = {"tokens": 0, "traced": 0}
    trace = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
    decode = gpu.decode

    def watched(reach: Any, how: Any, count: int) -> None:
        middle = work.new_tokens // 2 <= seen["tokens"] < work.new_tokens // 2 + tokens
        if middle and not seen["traced"]:
            torch.cuda.synchronize()
            trace.start()
        decode(reach, how, count)
        seen["tokens"] += count
        seen["traced"] += count if middle else 0
        if seen["traced"] and seen["tokens"] >= work.new_tokens // 2 + tokens and not seen.get("stopped"):
            torch.cuda.synchronize()
            trace.stop()
            seen["stopped"] = 1

    gpu.decode = watched
    sampler.run(work)
    gpu.decode = decode
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        found = growth(json.loads(Path(file.name).read_text())["traceEvents"])
    return [(name, us / seen["traced"], count // seen["traced"]) for name, us, count in found]


def growth(events: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """(kernel, microseconds, launches): the time each kernel adds, from the end of the previous one to its own end. A kernel
    that starts early takes longer than that."""
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"] + e["dur"])
    found: dict[str, tuple[float, int]] = {}
    end = kernels[0]["ts"] if kernels else 0.0
    for kernel in kernels:
        us, count = found.get(kernel["name"], (0.0, 0))
        found[kernel["name"]] = us + kernel["ts"] + kernel["dur"] - end, count + 1
        end = kernel["ts"] + kernel["dur"]
    return sorted(((name, us, count) for name, (us, count) in found.items()), key=lambda r: -r[1])


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "triton", "transformers", "vllm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def show(found: dict[str, Any]) -> None:
    """Print medians, the number of runs in brackets, and ratios."""
    peers = found["peers"]
    print("\n" + ", ".join(f"{p}: first token after {x['first_token_s']} s" for p, x in peers.items()))
    if "first_token_again_s" in peers["oncurve"]:
        print(f"oncurve, second start: first token after {peers['oncurve']['first_token_again_s']} s")
    print(f"transformers: {TRANSFORMERS_TOKENS} new tokens" if "transformers" in peers else "")
    print(f"{'prompts × group, prompt + new':40}" + "".join(f"{peer:>16}" for peer in peers) + "   ratios")
    for name in peers["oncurve"]["rates"]:
        rates = {p: x["rates"][name] for p, x in peers.items() if name in x["rates"]}
        medians = {p: statistics.median(own) for p, own in rates.items()}
        cells = "".join(f"{medians[p]:12,.0f} ({len(rates[p])})" if p in rates else f"{'–':>16}" for p in peers)
        ratios = "  ".join(f"{medians['oncurve'] / rate:.2f}× {p}" for p, rate in medians.items() if p != "oncurve")
        print(f"{name:40}{cells}   {ratios}")


def before(out: Path) -> dict[str, Any]:
    """The kernels of a step by workload, from an earlier run with --profile."""
    found: dict[str, Any] = json.loads(out.read_text()).get("step_kernels", {}) if out.exists() else {}
    return found


def profile_all(works: list[Work], shape: str, out: Path) -> None:
    """Print the time of a decode step by kernel and write it to the results."""
    sampler, kernels = Oncurve(shape), before(out)
    for work in works[:3]:
        print(f"\n{work.name}: one decode step")
        rows = profile(work, sampler)[:16]
        for name, microseconds, launches in rows:
            print(f"  {microseconds:9.1f} µs {launches:5}×  {name[:90]}")
        kernels[work.name] = [{"kernel": k, "us": round(us, 1), "launches": n} for k, us, n in rows]
    found = json.loads(out.read_text()) if out.exists() else {"commit": commit()}
    out.write_text(json.dumps(found | {"step_kernels": kernels}, indent=1) + "\n")


def compare(works: list[Work], said: argparse.Namespace) -> None:
    """Measure every peer in turn and write the results after each."""
    import torch

    found: dict[str, Any] = {"commit": commit(), "device": torch.cuda.get_device_name(), "versions": versions()}
    found |= {
        "shape": said.shape,
        "model": SHAPES[said.shape][1],
        "works": [asdict(w) for w in works],
        "peers": {},
        "step_kernels": before(said.out),
    }
    for peer in ["oncurve", *filter(None, said.against.split(","))]:
        own = in_own_process(peer, said, said.works)
        if own is not None:
            found["versions"] |= own.pop("versions")
            found["peers"][peer] = own
            said.out.parent.mkdir(exist_ok=True)
            said.out.write_text(json.dumps(found, indent=1) + "\n")
    if "oncurve" not in found["peers"]:
        raise SystemExit("no peer was measured")
    again = in_own_process("oncurve", said, NONE) if said.second_start else None  # with warm page cache and compiled kernels
    if again is not None:
        found["peers"]["oncurve"]["first_token_again_s"] = again["first_token_s"]
        said.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    print(f"written to {said.out}")


def chosen(names: str, shape: str) -> list[Work]:
    if names == NONE:
        return []
    if names:
        return [(WORKS + LONG_WORKS)[int(i)] for i in names.split(",")]
    return WORKS if shape == SHAPE else SHAPE_WORKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="", help="peers, separated by commas: modules, fp8, vllm, transformers")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--works", default="", help="workload numbers, separated by commas, or none; default: all but 4 and 5")
    parser.add_argument("--vllm-path", default="", help="prepended to PYTHONPATH of vLLM's process")
    parser.add_argument("--no-second-start", dest="second_start", action="store_false", help="start Oncurve only once")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    said = parser.parse_args()
    works = chosen(said.works, said.shape)
    if said.worker:
        works = works[:1] if said.worker == "transformers" else works
        measure(said.worker, said.shape, said.repeats, works, said.out)
    elif said.profile:
        profile_all(works, said.shape, said.out)
    else:
        compare(works, said)


if __name__ == "__main__":
    main()
