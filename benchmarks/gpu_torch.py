"""Opacus on the networks of `python -m benchmarks.gpu`, in torch, on the device that torch finds.

Products of float32 are in TF32, as JAX's are by default.
"""

import math
import statistics
import time
import warnings

import torch

from benchmarks import networks_torch as nets
from benchmarks.gradients_torch import clipped, ordinary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DEVICE == "cpu"
ROUNDS, SECONDS = (2, 0.0) if SMALL else (7, 0.02)
RANK = 8


def _cnn():
    rows = 8 if SMALL else 1_024
    return nets.Shift, torch.rand(rows, 1, 28, 28), torch.arange(rows) % 10, 1


def _wrn():
    rows, views = (2, 2) if SMALL else (64, 16)
    make = lambda: nets.WideResNet(*((10, 1) if SMALL else (16, 4)))  # noqa: E731
    x = torch.randn(rows * views, 3, 32, 32)
    return make, x, (torch.arange(rows) % 10).repeat_interleave(views), views


def _vit():
    rows, size = (2, 32) if SMALL else (64, 224)
    shape = {"width": 32, "layers": 2, "heads": 2, "classes": 10} if SMALL else {}
    make = lambda: nets.VisionTransformer(size, **shape)  # noqa: E731
    return make, torch.randn(rows, 3, size, size), torch.arange(rows) % 10, 1


def _texts(vocabulary):
    tokens = torch.randint(0, vocabulary, (4, 17) if SMALL else (32, 129))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 1


def _gpt2():
    shape = (100, 32, 16, 2, 2) if SMALL else (50_257, 768, 128, 12, 12)
    make = lambda: nets.Transformer(*shape, causal=True)  # noqa: E731
    return make, *_texts(shape[0])


def _gpt2_lora():
    make, *rest = _gpt2()
    return lambda: nets.with_lora(make(), RANK, {"0", "1", "2"}), *rest  # queries, keys, values


def _smollm2_lora():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128 if SMALL else 49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=2 if SMALL else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        use_cache=False,
    )

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)

        def forward(self, tokens):
            return self.model(tokens).logits.float()

    make = lambda: nets.with_lora(Logits(), RANK, {"q_proj", "v_proj"})  # noqa: E731
    return make, *_texts(config.vocab_size)


NETWORKS = {
    "cnn": _cnn,
    "gpt2": _gpt2,
    "wrn": _wrn,
    "vit": _vit,
    "gpt2-lora": _gpt2_lora,
    "smollm2-lora": _smollm2_lora,
}


def figures(piece):
    """Milliseconds, and megabytes at the most, of torch's gradient and of Opacus's ways to clip."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    make, x, y, views = NETWORKS[piece.split()[1]]()
    x, y = x.to(DEVICE), y.to(DEVICE)
    found, runs = {"batch": len(x) // views, "failed": {}, "peak, MB": {}}, {}
    for label in ("ordinary", "hooks", "ghost"):
        try:
            model = make().to(DEVICE)
            run = ordinary(model, x, y)
            if label != "ordinary":
                run = clipped(model, x, y, label, views)
            if not SMALL:
                torch.cuda.reset_peak_memory_stats()
            run()
            wait()
            if not SMALL:
                found["peak, MB"][label] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
            runs[label] = run
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            found["failed"][label] = f"{type(error).__name__}: {first}"[:200]
    found["milliseconds"] = in_turn(runs)
    yield found


def wait():
    if not SMALL:
        torch.cuda.synchronize()


def in_turn(runs):
    """Milliseconds of each, medians of rounds in which they run one after another."""
    times, seconds = {}, {name: [] for name in runs}
    for name, run in runs.items():
        began = time.perf_counter()
        run()
        wait()
        times[name] = max(1, min(50, math.ceil(SECONDS / (time.perf_counter() - began))))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in range(times[name]):
                run()
            wait()
            seconds[name].append((time.perf_counter() - began) / times[name])
    return {name: round(1e3 * statistics.median(each), 3) for name, each in seconds.items()}
