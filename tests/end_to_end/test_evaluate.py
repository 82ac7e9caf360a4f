"""Benchmarks through lm-evaluation-harness: equal to its own `hf` on the exported model, in any layout."""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.json
import pyarrow.parquet
import pytest
import tokenizers
import torch.distributed as dist
import yaml

from gnmr_megatron.cli.main import main
from gnmr_megatron.distributed.process_groups import stop_process_groups
from gnmr_megatron.errors import ConfigError
from tests.benchmark_data import write_benchmarks, write_subjects, write_texts
from tests.conftest import TINY, options
from tests.tiny_llama import save_llama

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the harness and what it loads
]

TASKS = ("hellaswag", "mmlu_anatomy", "mmlu_astronomy", "perplexity")
LENGTH = 192
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
}


def verb(*arguments):
    """Exit code, standard output and standard error of a verb, in this process, which has loaded torch."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def done(*arguments):
    """Standard output of a verb that has to succeed."""
    code, out, err = verb(*arguments)
    assert code == 0, err
    return out


def refused(*arguments):
    """The one line in which a verb refuses what it is given."""
    code, out, err = verb(*arguments)
    if dist.is_initialized():  # a process of its own would end here
        stop_process_groups()
    assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
    return err


def save_tokenizer_with_begin(folder):
    """A byte-level tokenizer.json that puts a token before every text, as Llama 3's does."""
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    trained = tokenizers.ByteLevelBPETokenizer()
    text = ["The cat sat on the mat and the dog ran to the log. How many cups are? Answer:"] * 4
    trained.train_from_iterator(text, vocab_size=300, special_tokens=[begin, end], show_progress=False)  # fmt: skip
    tokenizer = trained._tokenizer
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, 0)]
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a converted LLaMA, its export, benchmarks and texts."""
    folder = tmp_path_factory.mktemp("evaluate")
    size = save_tokenizer_with_begin(folder / "hf")
    save_llama(folder / "hf", vocab_size=size, max_position_embeddings=LENGTH)
    done("convert", "hf-to-megatron", folder / "hf", "--output", folder / "llama")
    done("convert", "megatron-to-hf", folder / "llama", "--output", folder / "exported")
    write_benchmarks(folder / "benchmarks")
    write_texts(folder / "texts.jsonl")
    return folder


def asked(world, checkpoint="llama", tasks=TASKS):
    """Arguments of an evaluation."""
    data = ("--task-data", world / "benchmarks", "--text", world / "texts.jsonl")
    return ("evaluate", world / checkpoint, "--tasks", ",".join(tasks), *data)


@pytest.fixture(scope="module")
def ours(world):
    """Results and samples of the converted checkpoint, in one process."""
    done(*asked(world), "--output", world / "one")
    return read(world / "one")


@pytest.fixture(scope="module")
def layouts(world):
    """Folder of the results of two processes in each layout; one launch."""
    given = {
        "checkpoint": world / "llama", "task_data": world / "benchmarks",
        "text": world / "texts.jsonl", "tasks": TASKS, "batch_size": 3,
    }  # fmt: skip
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("evaluate_worker.py")
    arguments = [json.dumps(given, default=str), world / "layouts", json.dumps(LAYOUTS)]
    result = subprocess.run(
        [sys.executable, *command, worker, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return world / "layouts"


@pytest.fixture(scope="module")
def theirs(world):
    """The harness's own backend on the exported folder."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(world / "exported"), device="cpu", dtype="float32", batch_size=4)


def read(folder):
    """Metrics, and each task's answers [(log-probability, is greedy)] by document."""
    results = json.loads((folder / "results.json").read_text())["results"]
    metrics = {
        (task, key): value
        for task, values in results.items()
        for key, value in values.items()
        if "," in key and isinstance(value, float)
    }
    answers = {}
    for path in sorted(folder.glob("samples_*.jsonl")):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            answers[path.stem, sample["doc_id"]] = sample["filtered_resps"]
    return metrics, answers


def assert_equal(found, expected, *, tolerance):
    """The same metrics, the same greedy flags, and log-probabilities within a tolerance."""
    assert found[0].keys() == expected[0].keys()
    for key, value in expected[0].items():
        assert math.isclose(found[0][key], value, rel_tol=tolerance), key
        if key[1].startswith("acc"):
            assert found[0][key] == value, key
    assert found[1].keys() == expected[1].keys()
    for key, answers in expected[1].items():
        for one, other in zip(found[1][key], answers, strict=True):
            one, other = (each if isinstance(each, list) else [each, None] for each in (one, other))
            # relative, too: the harness sums the thousand tokens of a document in FP32
            assert math.isclose(one[0], other[0], rel_tol=1e-7, abs_tol=tolerance), key
            assert one[1] == other[1], key


def answers_of_hf(lm, world, work, *, num_fewshot=None):
    """What the harness finds by its own backend, as `read` gives it."""
    from lm_eval import evaluator

    from gnmr_megatron.training.harness.tasks import LocalTasks

    texts = [json.loads(line)["text"] for line in (world / "texts.jsonl").read_text().splitlines()]
    tasks = LocalTasks(
        TASKS, include_path=None, data=world / "benchmarks", num_fewshot=num_fewshot, work=work
    ).load(texts)
    details = evaluator.evaluate(lm=lm, task_dict=tasks)
    metrics = {
        (task, key): value
        for task, values in details["results"].items()
        for key, value in values.items()
        if "," in key and isinstance(value, float)
    }
    answers = {
        (f"samples_{task}", sample["doc_id"]): [
            list(each) if isinstance(each, tuple) else each for each in sample["filtered_resps"]
        ]
        for task, samples in details["samples"].items()
        for sample in samples
    }
    return metrics, answers


def test_scores_and_every_answer_are_those_of_the_harness_s_own_backend(
    world, ours, theirs, tmp_path
):
    expected = answers_of_hf(theirs, world, tmp_path)
    assert {task for task, _ in ours[0]} == set(TASKS)
    assert len(ours[1]) == 3 * 20 + 6
    assert_equal(ours, expected, tolerance=1e-4)


def test_prompts_that_are_too_long_lose_their_begin_as_with_the_harness_s_own_backend(
    world, theirs, tmp_path
):
    (tmp_path / "work").mkdir()
    theirs._max_length = 64
    try:
        expected = answers_of_hf(theirs, world, tmp_path / "work", num_fewshot=2)
    finally:
        theirs._max_length = None
    shots = ("--num-fewshot", 2, "--max-length", 64, "--batch-size", 5)
    told = json.loads(done(*asked(world), *shots, "--json", "--output", tmp_path / "short"))
    assert told["truncated"] > 40
    assert told["num_fewshot"] == {**dict.fromkeys(TASKS, 2), "perplexity": 0}
    assert_equal(read(tmp_path / "short"), expected, tolerance=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_of_two_processes_gives_the_answers_of_one(layouts, ours, layout):
    assert_equal(read(layouts / layout), ours, tolerance=1e-4)


def test_the_size_of_batches_does_not_change_answers(world, ours, tmp_path):
    done(*asked(world), "--batch-size", 1, "--output", tmp_path / "single")
    assert_equal(read(tmp_path / "single"), ours, tolerance=1e-4)


def test_all_subjects_of_mmlu_are_averaged_by_their_sizes(world, tmp_path):
    import lm_eval.tasks

    shipped = Path(lm_eval.tasks.__file__).parent / "mmlu/default"
    subjects = [
        yaml.safe_load(path.read_text())["dataset_name"] for path in shipped.glob("mmlu_*.yaml")
    ]
    assert len(subjects) == 57
    data = write_subjects(tmp_path, subjects)
    arguments = ("--tasks", "mmlu", "--task-data", data, "--max-length", 64, "--json")
    told = json.loads(done("evaluate", world / "llama", *arguments))
    sizes = told["num_samples"]
    assert set(sizes.values()) == {2, 3}
    right = sum(told["results"][task]["acc,none"] * size for task, size in sizes.items())
    assert math.isclose(told["groups"]["mmlu"]["acc,none"], right / sum(sizes.values()))
    parts = ("stem", "other", "humanities", "social_sciences")
    assert told["groups"].keys() == {"mmlu", *(f"mmlu_{part}" for part in parts)}


def test_parquet_files_as_the_hub_names_them_are_read(world, ours, tmp_path):
    table = pyarrow.json.read_json(world / "benchmarks/hellaswag/validation.jsonl")
    folder = tmp_path / "benchmarks/hellaswag/data"
    folder.mkdir(parents=True)
    for part, rows in enumerate((table.slice(0, 7), table.slice(7))):
        pyarrow.parquet.write_table(rows, folder / f"validation-0000{part}-of-00002.parquet")
    data = ("--task-data", tmp_path / "benchmarks", "--output", tmp_path / "out")
    done("evaluate", world / "llama", "--tasks", "hellaswag", *data)
    _, answers = read(tmp_path / "out")
    expected = {key: value for key, value in ours[1].items() if key[0] == "samples_hellaswag"}
    assert answers == expected


def test_greedy_texts_are_those_of_the_harness_s_own_backend(world, theirs, tmp_path):
    from lm_eval.api.instance import Instance

    generation = {"until": ["."], "max_gen_toks": 12, "do_sample": False}
    task = {
        "task": "continue", "dataset_path": "json", "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(world / "texts.jsonl")}},
        "test_split": "test", "doc_to_text": "{{text[:40]}}", "doc_to_target": "{{text[40:50]}}",
        "generation_kwargs": generation,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/continue.yaml").write_text(json.dumps(task))
    arguments = ("--tasks", "continue", "--include-path", tmp_path / "tasks", "--batch-size", 2)
    done("evaluate", world / "llama", *arguments, "--output", tmp_path / "out")
    lines = (tmp_path / "out/samples_continue.jsonl").read_text().splitlines()
    samples = {entry["doc_id"]: entry for entry in map(json.loads, lines)}
    contexts = [samples[number]["doc"]["text"][:40] for number in range(6)]
    requests = [
        Instance("generate_until", {}, (context, dict(generation)), number)
        for number, context in enumerate(contexts)
    ]
    # one by one: with a batch, transformers pads on the left with the end's token
    expected = [theirs.generate_until([request])[0] for request in requests]
    assert [samples[number]["resps"][0][0] for number in range(6)] == expected
    assert len(set(expected)) > 1

    short = ("--max-length", 24, "--json", "--output", tmp_path / "short")
    told = json.loads(done("evaluate", world / "llama", *arguments, *short))
    assert told["truncated"] == 6  # to the 12 tokens that leave room for as many
    lines = (tmp_path / "short/samples_continue.jsonl").read_text().splitlines()
    samples = {entry["doc_id"]: entry for entry in map(json.loads, lines)}
    theirs._max_length = 24
    try:
        cut = [theirs.generate_until([request])[0] for request in requests]
    finally:
        theirs._max_length = None
    assert [samples[number]["resps"][0][0] for number in range(6)] == cut
    assert cut != expected

    task["generation_kwargs"] = {"until": ["."], "do_sample": True, "temperature": 0.7}
    (tmp_path / "tasks/continue.yaml").write_text(json.dumps(task))
    code, _, err = verb("evaluate", world / "llama", *arguments)
    stop_process_groups()
    assert (code, "only greedy decoding is implemented" in err) == (2, True)


class Script:
    """In place of a model: goes on with given tokens, whatever the prompt."""

    def __init__(self, tokens, *, replica=0):
        self.tokens, self.replica, self.num_replicas, self.asked = tokens, replica, 2, []

    def next_tokens(self, inputs):
        self.asked.append(list(inputs))
        return [self.tokens[len(self.asked) - 1]] * len(inputs)


def generating(world, monkeypatch, script, **generation):
    """Answers to generation requests, as one of two replicas has them, of which the other has none."""
    from lm_eval.api.instance import Instance
    from transformers import AutoTokenizer

    from gnmr_megatron.training.harness import language_model

    monkeypatch.setattr(language_model, "gather_from_all", lambda own: [own, {}])
    tokenizer = AutoTokenizer.from_pretrained(world / "exported")
    model = language_model.MegatronLM(
        script, tokenizer, max_length=32, batch_size=4, generation=generation
    )

    def answer(prompt, **settings):
        return model.generate_until([Instance("generate_until", {}, (prompt, settings), 0)])[0]

    return tokenizer, answer


def test_a_stop_sequence_may_be_a_special_token_or_text_across_tokens(world, monkeypatch):
    script = Script([])
    tokenizer, answer = generating(world, monkeypatch, script)
    (word,) = tokenizer.encode(" dog", add_special_tokens=False)
    script.tokens = [word, tokenizer.bos_token_id, word, word]
    assert answer("The", until=[tokenizer.bos_token], max_gen_toks=4) == " dog"
    assert len(script.asked) == 2  # and not to the end
    script.asked.clear()
    assert answer("The", until=["g d"], max_gen_toks=4) == " do"
    assert len(script.asked) == 3


def test_a_text_ends_with_any_of_the_tokens_that_its_generation_config_names(world, monkeypatch):
    script = Script([])
    tokenizer, answer = generating(world, monkeypatch, script, eos_token_id=[1, 290])
    (word,) = tokenizer.encode(" dog", add_special_tokens=False)
    script.tokens = [word, 290, word, word]
    answer("The", until=["."], max_gen_toks=4)
    assert len(script.asked) == 2


@pytest.mark.parametrize(
    ("generation", "asked", "told"),
    [
        ({}, {"num_beams": 4}, "asks for num_beams 4"),
        ({}, {"repetition_penalty": 5.0}, "asks for repetition_penalty 5.0"),
        ({}, {"stopping": "soon"}, "asks for stopping soon"),
        ({"repetition_penalty": 1.2}, {}, "asks for repetition_penalty 1.2"),
    ],
)
def test_generation_that_is_not_greedy_is_refused(world, monkeypatch, generation, asked, told):
    _, answer = generating(world, monkeypatch, Script([0, 0]), **generation)
    with pytest.raises(ConfigError, match=told):
        answer("The", until=["."], max_gen_toks=2, **asked)


def test_generation_may_name_what_greedy_decoding_is(world, monkeypatch):
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "do_sample": True, "temperature": 0.6}
    _, answer = generating(world, monkeypatch, Script([0, 0]), **neutral)
    answer("The", until=["."], max_gen_toks=2, do_sample=False, num_beams=1, top_p=None)


def test_a_tokenizer_without_an_end_is_refused(world, monkeypatch):
    tokenizer, answer = generating(world, monkeypatch, Script([0, 0]))
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"names no end of a text; .* eos_token: --files-from"):
        answer("The", until=["."], max_gen_toks=2)


def test_an_empty_prompt_begins_with_the_token_of_a_text_s_begin(world, monkeypatch):
    script = Script([0, 0])
    tokenizer, answer = generating(world, monkeypatch, script)
    tokenizer.backend_tokenizer.post_processor = None  # which puts a begin before all texts
    assert tokenizer.encode("") == []
    answer("", until=["."], max_gen_toks=1)
    assert script.asked[0] == [[tokenizer.bos_token_id]]


def test_a_replica_that_answers_nothing_finds_what_is_wrong_too(world, monkeypatch):
    _, answer = generating(world, monkeypatch, Script([], replica=1))
    with pytest.raises(ConfigError, match="only greedy decoding"):
        answer("The", until=["."], do_sample=True, temperature=0.5)
    with pytest.raises(ConfigError, match=r"generates 32 tokens, which leaves no room .* in 32"):
        answer("The", until=["."], max_gen_toks=32)


@pytest.fixture(scope="module")
def run(world, dataset):
    """A run from scratch with a low path that rounds, and one that trains adapters on it."""
    settings = TINY | {
        "data.datasets": f"[{dataset}]",
        "runs_dir": world / "runs",
        "train.steps": 3,
        "precision.low": "fp4_e2m1",
        "precision.recovery": "saved_int8",
        "optimizer.lr": 1e-2,
    }
    done("train", *options(settings))
    lora = {
        "name": "lora",
        "lora.rank": 2,
        "lora.base": world / "runs/run",
        "precision.low": "bf16",
    }
    done("train", *options(settings | lora))
    return world / "runs/run"


def perplexity(checkpoint, *arguments):
    """Name of the path, and bits a byte."""
    told = json.loads(done("evaluate", checkpoint, "--tasks", "perplexity", "--json", *arguments))
    return told["path"], told["results"]["perplexity"]["bits_per_byte,none"]


def test_text_without_spaces_or_with_unicode_line_ends_is_scored(run, tmp_path):
    text = tmp_path / "long.jsonl"
    documents = [
        json.dumps({"text": piece}, ensure_ascii=False) for piece in ("ab" * 600, "a\u2028b")
    ]
    text.write_text("\n".join(documents) + "\n")
    told = json.loads(
        done(
            "evaluate",
            run,
            "--tasks",
            "perplexity",
            "--json",
            "--text",
            text,
            "--output",
            tmp_path / "out",
        )
    )["results"]["perplexity"]
    assert told["word_perplexity,none"] is None  # beyond what a float holds
    assert 1 < told["byte_perplexity,none"] < 1000


def test_paths_are_those_of_the_run_and_recovery_is_the_default(run, world):
    text = ("--text", world / "texts.jsonl")
    name, recovery = perplexity(run, *text)
    assert name == "recovery"
    found = {path: perplexity(run, *text, "--path", path) for path in ("low", "fp32", "bf16")}
    assert [name for name, _ in found.values()] == list(found)
    low, plain, rounded = (value for _, value in found.values())
    assert plain == recovery  # saving rounds nothing in the forward pass
    assert 0 < abs(rounded - plain) < abs(low - plain) < 0.1
    assert abs(low - plain) > 1e-5


def test_held_out_text_of_a_run_scores_as_its_export_does(run, world, dataset, tmp_path):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from gnmr_megatron.data.tokenizer import load_tokenizer
    from gnmr_megatron.training.harness.tasks import LocalTasks

    done("convert", "megatron-to-hf", run, "--output", tmp_path / "hf")
    tokenizer = load_tokenizer(dataset / "tokenizer.model")
    documents = IndexedDataset(str(dataset / "text"))
    held_out = range(round(0.98 * len(documents)), len(documents))
    texts = [tokenizer.decode(documents[number].tolist()[:-1]) for number in held_out]
    tasks = LocalTasks(
        ["perplexity"], include_path=None, data=None, num_fewshot=None, work=tmp_path
    )
    lm = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32")
    expected = evaluator.evaluate(lm=lm, task_dict=tasks.load(texts))["results"]["perplexity"]
    found = perplexity(run)[1]
    assert math.isclose(found, expected["bits_per_byte,none"], rel_tol=1e-6)


def test_adapters_over_a_base_score_as_the_two_merged(run, world, tmp_path):
    adapters = world / "runs/lora"
    done("lora", "merge", adapters, "--output", tmp_path / "merged")
    text = ("--text", world / "texts.jsonl", "--path", "fp32")
    merged = perplexity(tmp_path / "merged", *text)[1]
    assert math.isclose(perplexity(adapters, *text)[1], merged, rel_tol=1e-6)
    assert abs(merged - perplexity(run, *text)[1]) > 1e-6


def test_what_cannot_be_evaluated_is_refused_in_one_line(world, tmp_path):
    hellaswag = asked(world, tasks=["hellaswag"])[:4]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "--task-data: is needed for hellaswag" in refused(*hellaswag)
    told = refused(*hellaswag, "--task-data", empty)
    assert f"{empty}/hellaswag: has no validation.jsonl" in told
    assert "hf download Rowan/hellaswag --repo-type dataset" in told
    told = refused(*asked(world, tasks=["mmlu"])[:4], "--task-data", world / "benchmarks")
    assert "/mmlu/" in told
    assert "hf download cais/mmlu" in told
    assert "is needed for perplexity" in refused("evaluate", world / "llama", "--tasks", "perplexity")  # fmt: skip
    assert "--path low: no run is around" in refused(*asked(world), "--path", "low")
    layout = ("--parallel.pipeline_model_parallel_size", 3)
    assert "model.num_layers: 4 is not divisible" in refused(*asked(world), *layout)
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\nno JSON\n')
    told = refused("evaluate", world / "llama", "--tasks", "perplexity", "--text", tmp_path / "text.jsonl")  # fmt: skip
    assert "text.jsonl:2: is no JSON object" in told
    assert "is no complete checkpoint" in refused(*asked(world, checkpoint="benchmarks"))


def test_a_damaged_checkpoint_is_refused_with_the_file_s_name(world, tmp_path):
    shutil.copytree(world / "llama", tmp_path / "llama")
    victim = next((tmp_path / "llama").glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    text = ("--text", world / "texts.jsonl")
    told = refused("evaluate", tmp_path / "llama", "--tasks", "perplexity", *text)
    assert f"{victim}: is damaged" in told


def test_an_unknown_task_is_named_with_the_nearest_one(world, monkeypatch):
    from lm_eval.tasks import manager

    # one folder of tasks: to look through the thousands of all takes seconds
    shipped = Path(manager.__file__).parent / "hellaswag/manager.py"
    monkeypatch.setattr(manager, "__file__", str(shipped))
    assert "did you mean `hellaswag`?" in refused(*asked(world, tasks=["helaswag", "perplexity"]))
