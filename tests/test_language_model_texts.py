"""Texts, fine_tune.py and dpo.py of examples/language_model, on a tiny random model."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.refusing import refused

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "language_model"))

import dpo
import fine_tune
import llama
import texts
import weights

END = "<|endoftext|>"


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and some frequent pieces."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["Review: good film\nSentiment: yes no"] * 9, trainer)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model as Hugging Face lays it out, with random weights, and texts."""
    folder = tmp_path_factory.mktemp("language_model")
    config = llama.Config(300, 16, 32, 2, 2, 1, 8)
    params = llama.init(jax.random.key(0), config)
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    weights.save_merged(folder, config, params, tokenizer)
    words = ["good", "bad", "a film", "very long and very slow"]
    for name, count in (("private", 512), ("held_out", 9)):
        records = []
        for i in range(count):
            answers = (" yes", " no")[:: 1 if i % 3 else -1]
            text = f"Review: {words[i % 4]}\nSentiment:"
            given = {"text": text, "answer": answers[0], "user": i % 160}
            records.append(given | {"prompt": text, "chosen": " yes", "rejected": " no"})
        lines_to(folder / f"{name}.jsonl", records)
    return folder


def lines_to(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return file


def test_a_text_is_cut_and_ends_and_an_answer_is_whole(tokenizer, tmp_path):
    given = [
        {"text": "good\u2028 film", "answer": " yes"},
        {"text": "good film"},
        {"text": "g" * 99},
    ]
    file = lines_to(tmp_path / "texts.jsonl", given[:1])
    file.write_text(file.read_text("utf-8").replace("\\u2028", "\u2028") + "\n\r\n", "utf-8")
    plain = lines_to(tmp_path / "plain.jsonl", given[1:])
    ids = lambda text: tokenizer.encode(text).ids  # noqa: E731
    for length in (40, 5):
        (first,) = texts.read(file, tokenizer, length)
        second, third = texts.read(plain, tokenizer, length)
        said, asked = ids(" yes"), ids(given[0]["text"])[: length - len(ids(" yes"))]
        assert first["tokens"] == (asked + said + ids(END))[:length]
        assert first["tokens"][slice(*first["answer"])] == said
        assert second["tokens"] == (ids("good film") + ids(END))[:length]
        assert second["answer"][0] == second["answer"][1]
        assert third["tokens"] == ids("g" * 99)[:length]
    # Tokenizers that would cut or fill, and that begin every string with a mark of their own.
    marked = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    marked.enable_truncation(3)
    marked.enable_padding(length=20)
    marked.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    marked.add_tokens(["▁"])
    (record,) = texts.read(lines_to(file, given[:1]), marked, 40)
    assert marked.decode(record["tokens"][slice(*record["answer"])]).endswith("yes")
    assert len(record["tokens"]) > 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "must hold texts"),
        ('{"text": "a", "user": 0}\n{"text"', "line 2: expected one JSON"),
        ('{"text": "a", "user": 0}\n\n\xff', "line 3: expected one JSON"),
        ('{"text": "secret \\ud800"}', "line 1: expected one JSON"),
        ("[" * 100_000, "line 1: expected one JSON"),
        ('["secret"]', r"line 1: expected an object with \['text', 'user'\]"),
        ('{"text": "", "user": "ann"}', r"line 1: expected an object with \['text'\]"),
        ('{"text": "secret"}', r"line 1: expected an object with \['user'\]"),
        ('{"text": 3, "user": 0}', "line 1: 'text' and 'answer' must be strings"),
        ('{"text": "secret", "answer": "xyzuv", "user": 7}', "must have 1 to 4 tokens.*got 5"),
        ('{"text": "a", "answer": "b", "user": 7}\n{"text": "a", "user": 7}', "line 2 without"),
    ],
)
def test_other_lines_are_refused_with_their_number(tokenizer, tmp_path, line, words):
    file = tmp_path / "texts.jsonl"
    file.write_bytes(line.encode("latin-1"))
    with pytest.raises(ValueError, match=words) as error:
        texts.read(file, tokenizer, 5, needs=("user",))
    assert "secret" not in str(error.value)


def test_a_source_is_of_one_length_or_of_rooms_or_of_users(tokenizer, folder):
    records = texts.read(folder / "private.jsonl", tokenizer, 40, needs=("user",))
    whole, lengths = texts.source(records, 40), [len(record["tokens"]) for record in records]
    assert whole["tokens"].shape == (512, 40)
    assert list(whole["tokens_mask"].sum(1)) == lengths
    rooms = texts.rooms(records, (40, 24), batch=16)
    share = np.mean(np.array(lengths) <= 24)
    assert 0 < share < 1
    expected = {24: 16 * share, 40: 16 * (1 - share)}
    assert rooms == {n: np.ceil(mean + 6 * mean**0.5) for n, mean in expected.items()}
    assert texts.rooms(records, (40, 99), batch=16)[99] == 1
    several = texts.source(records, 40, rooms=rooms)
    assert several.buckets == tuple(rooms.items())
    users = texts.source(records, 40, texts_per_user=3)
    assert (len(users), users.records_per_user, users.present.sum()) == (160, 3, 480)
    refused("rooms and texts_per_user", texts.source, records, 40, 3, rooms)


def test_the_judge_counts_every_text_and_needs_answers_that_differ_at_once(tokenizer, folder):
    config, params, _ = weights.load(folder)
    records = texts.read(folder / "held_out.jsonl", tokenizer, 40)
    records.append({**records[0], "answer": np.array([3, 3], np.int32)})  # and one without
    found = texts.Judge(config, tokenizer, records, 40, rows=4)(params)
    right, losses, rows = [], [], texts.source(records, 40)["tokens"]
    logits = jax.jit(jax.vmap(lambda tokens: llama.logits(params, tokens, config)))(rows)
    for record, scores in zip(records, np.asarray(jax.nn.log_softmax(logits)), strict=True):
        tokens, (at, after) = record["tokens"], record["answer"]
        losses += [-scores[i, tokens[i + 1]] for i in range(at - 1)]
        answers = [tokenizer.encode(answer).ids[0] for answer in (" yes", " no")]
        if at < after:
            right.append(answers[np.argmax(scores[at - 1, np.array(answers)])] == tokens[at])
    assert len(right) == len(records) - 1
    want = {"accuracy": np.mean(right), "perplexity": np.exp(np.mean(losses))}
    assert found == pytest.approx(want, rel=1e-2)
    alone = texts.Judge(config, tokenizer, records[-1:] * 40, 40)(params)
    assert list(alone) == ["perplexity"]
    asked = records[0]["tokens"][:2]
    other = [{"tokens": [*asked, 7, last], "answer": (2, 4)} for last in (8, 9)]
    refused("must begin with different tokens", texts.Judge, config, tokenizer, other, 40)


ARGUMENTS = "--steps 3 --batch 16 --length 32 --rows 8 --prompt Review --canaries 0 --epsilon"


@pytest.mark.parametrize(
    "options",
    ["8 --canaries 8 --size 500", "8 --full --user 4", "inf --buckets 20"],
    ids=["lora", "user", "buckets"],
)
def test_fine_tune_from_files_to_adapters(folder, tmp_path, capsys, options):
    arguments = [folder, folder / "private.jsonl", folder / "held_out.jsonl", tmp_path / "run"]
    arguments = [*map(str, arguments), *ARGUMENTS.split(), *options.split()]
    args = fine_tune.parser.parse_args(arguments)
    fine_tune.main(args)
    said = capsys.readouterr().out
    assert len(re.findall(r"(?:before|after): .*perplexity \d", said)) == 2
    epsilon = re.search(r"epsilon ([\d.]+|inf)", said)[1]
    assert epsilon == "inf" if "inf" in options else 7.9 < float(epsilon) <= 8
    if "--canaries" in options:  # what is finished is only looked at
        fine_tune.main(args)
        assert capsys.readouterr().out == said
    merged = load_file(tmp_path / "run" / "merged" / "model.safetensors")
    assert merged.keys() == load_file(folder / "model.safetensors").keys()
    if "full" not in options:
        adapters = load_file(tmp_path / "run" / "adapters" / "adapter_model.safetensors")
        assert {name.split(".")[-2] for name in adapters} == {"lora_A", "lora_B"}
        assert all(np.any(array) for array in adapters.values())


def test_dpo_learns_what_people_prefer(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dpo, "BETA", 1.0)
    files = [folder, folder / "private.jsonl", folder / "held_out.jsonl", tmp_path]
    options = "--steps 10 --batch 256 --length 32 --rate 0.01".split()
    dpo.main(dpo.parser.parse_args([*map(str, files), *options]))
    said = capsys.readouterr().out
    before, after = map(float, re.findall(r"(?:before|after) ([\d.]+)", said))
    assert before == pytest.approx(np.log(2), abs=1e-3)
    assert after < 0.5
    assert 3.9 < float(re.search(r"epsilon ([\d.]+)", said)[1]) <= 4
    assert load_file(tmp_path / "adapters" / "adapter_model.safetensors")
