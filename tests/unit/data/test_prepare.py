import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.data.manifest import describe_datasets, read_manifest
from gnmr_megatron.data.prepare import PrepareRequest, prepare
from gnmr_megatron.data.tokenizer import load_tokenizer, train_sentencepiece
from gnmr_megatron.errors import DataError

TEXT = "def add(a, b):\n\treturn a + b  # Größe ☃\n\n\n    x = [1, 2,   3]\n"


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(150):
        (folder / f"{number:03}.txt").write_text(TEXT + f"value_{number} = {number * 7919}\n")
    (folder / "empty.txt").write_text(" \n")
    return folder


def request(corpus, output, **changes):
    return PrepareRequest(
        **{"inputs": (str(corpus),), "output": output, "vocab_size": 400, **changes}
    )


def test_the_dataset_reads_with_megatron_and_holds_the_tokenizers_ids_and_document_ends(
    corpus, tmp_path
):
    result = prepare(request(corpus, tmp_path / "out"))
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out/tokenizer.model"))
    dataset = IndexedDataset(str(tmp_path / "out/text"))
    files = sorted(corpus.glob("0*.txt")) + sorted(corpus.glob("1*.txt"))
    assert len(dataset) == result.manifest.documents == len(files) == 150
    for index, file in enumerate(files):
        assert dataset[index].tolist() == [*model.encode(file.read_text()), model.eos_id()]
    assert result.manifest.tokens == sum(len(dataset[index]) for index in range(150))
    assert result.manifest.empty_documents == 1
    assert result.manifest.text_bytes == sum(file.stat().st_size for file in files)


def test_decoding_gives_back_every_byte(corpus, tmp_path):
    prepare(request(corpus, tmp_path / "out"))
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.model")
    for text in (TEXT, "  führend", "\t\t\n \n", "日本語 🙂", "ende  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_workers_change_no_byte(corpus, tmp_path):
    hashes = []
    for workers in (1, 2):
        output = tmp_path / f"out{workers}"
        prepare(request(corpus, output, workers=workers))
        hashes.append(
            [
                hashlib.sha256((output / name).read_bytes()).hexdigest()
                for name in ("text.bin", "text.idx")
            ]
        )
    assert hashes[0] == hashes[1]


def test_an_equal_request_is_reused_and_another_one_refused_until_overwritten(corpus, tmp_path):
    output = tmp_path / "out"
    first = prepare(request(corpus, output))
    stamp = (output / "text.bin").stat().st_mtime_ns
    again = prepare(request(corpus, output, workers=2))
    assert not first.is_reused
    assert again.is_reused
    assert (output / "text.bin").stat().st_mtime_ns == stamp
    with pytest.raises(DataError, match="holds a dataset of other inputs or options"):
        prepare(request(corpus, output, vocab_size=350))
    assert (
        prepare(request(corpus, output, vocab_size=350, overwrite=True)).manifest.vocab_size == 350
    )


def test_a_changed_file_is_not_taken_for_the_same_request(corpus, tmp_path):
    prepare(request(corpus, tmp_path / "out"))
    (corpus / "000.txt").write_text("something else")
    with pytest.raises(DataError, match="other inputs or options"):
        prepare(request(corpus, tmp_path / "out"))


def test_a_folder_that_is_no_dataset_is_never_replaced(corpus, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="exists and is no prepared dataset"):
        prepare(request(corpus, tmp_path / "mine"))
    with pytest.raises(DataError, match="exists and is no prepared dataset"):
        prepare(request(corpus, tmp_path / "mine", overwrite=True))
    assert (tmp_path / "mine/thesis.tex").read_text() == "years of work"


def test_a_vocabulary_larger_than_the_text_supports_is_lowered(corpus, tmp_path):
    result = prepare(request(corpus, tmp_path / "out", vocab_size=60_000))
    assert 300 < result.manifest.vocab_size < 60_000
    assert load_tokenizer(tmp_path / "out/tokenizer.model").vocab_size == result.manifest.vocab_size


def test_a_vocabulary_too_small_for_the_characters_is_refused():
    with pytest.raises(DataError, match="--vocab-size 100 is too small"):
        train_sentencepiece(["some words", "and more"], vocab_size=100)


def test_a_given_tokenizer_is_copied_and_used(corpus, tmp_path):
    prepare(request(corpus, tmp_path / "one"))
    given = tmp_path / "one/tokenizer.model"
    second = prepare(request(corpus, tmp_path / "two", tokenizer=given))
    assert second.manifest.tokenizer_fingerprint == hashlib.sha256(given.read_bytes()).hexdigest()


def test_a_hugging_face_tokenizer_is_used(corpus, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<|endoftext|>"]
    model.train_from_iterator(
        [TEXT], trainers.BpeTrainer(special_tokens=special, show_progress=False)
    )
    model.save(str(tmp_path / "given.json"))
    prepare(request(corpus, tmp_path / "out", tokenizer=tmp_path / "given.json", max_documents=2))
    dataset = IndexedDataset(str(tmp_path / "out/text"))
    assert dataset[1].tolist() == [*model.encode((corpus / "001.txt").read_text()).ids, 1]


def test_bad_records_are_skipped_up_to_the_limit_and_shown(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "eins zwei drei"}\n{broken\n' * 3)
    with pytest.raises(
        DataError, match=r"more than 2 records cannot be read:\n  .*a\.jsonl:2: is not JSON"
    ):
        prepare(request(source, tmp_path / "out", max_bad=2, vocab_size=300))
    assert not (tmp_path / "out").exists()
    result = prepare(request(source, tmp_path / "out", max_bad=3, vocab_size=300))
    assert (result.manifest.documents, result.manifest.bad_records) == (3, 3)
    assert [bad.line for bad in result.bad_records] == [2, 4, 6]


def test_a_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(DataError, match="no text"):
        prepare(request(tmp_path / "a.txt", tmp_path / "out"))


def test_a_dataset_with_a_missing_or_shortened_file_is_refused_with_the_command_to_run(
    corpus, tmp_path
):
    output = tmp_path / "out"
    prepare(request(corpus, output))
    data = (output / "text.bin").read_bytes()
    (output / "text.bin").write_bytes(data[:-2])
    with pytest.raises(
        DataError, match=rf"text\.bin: has {len(data) - 2} bytes instead of {len(data)}; prepare it"
    ):
        read_manifest(output)
    (output / "text.bin").unlink()
    with pytest.raises(
        DataError, match=r"text\.bin: is missing; prepare it again|text\.bin: is missing"
    ):
        describe_datasets(DataConfig(datasets=[str(output)]))


def test_datasets_of_different_tokenizers_are_not_mixed(corpus, tmp_path):
    prepare(request(corpus, tmp_path / "one"))
    prepare(request(corpus, tmp_path / "two", vocab_size=350))
    with pytest.raises(DataError, match="two: was prepared with another tokenizer"):
        describe_datasets(DataConfig(datasets=[str(tmp_path / "one"), str(tmp_path / "two")]))


def test_plain_megatron_files_need_a_tokenizer(corpus, tmp_path):
    prepare(request(corpus, tmp_path / "one"))
    prefix = str(tmp_path / "one/text")
    with pytest.raises(DataError, match=r"data\.tokenizer: is needed"):
        describe_datasets(DataConfig(datasets=[prefix]))
    info = describe_datasets(
        DataConfig(datasets=[prefix], tokenizer=str(tmp_path / "one/tokenizer.model"))
    )
    assert info.vocab_size == 400


def kill_while_preparing(what, *, after):
    """Prepare in a child process, and kill it some seconds after its first batch was written."""
    started, writes = os.pipe()
    child = os.fork()
    if child == 0:
        prepare(what, on_progress=lambda *_: os.write(writes, b"x"))
        os._exit(0)
    os.read(started, 1)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(started)
    os.close(writes)


def test_a_killed_preparation_leaves_nothing_that_looks_whole(corpus, tmp_path):
    """kill -9 at random times; what is there afterwards is either a whole dataset or refused."""
    output = tmp_path / "out"
    for delay in np.random.default_rng(0).uniform(0, 0.06, size=20):
        kill_while_preparing(request(corpus, output, overwrite=True), after=delay)
        if output.exists():
            manifest = read_manifest(output)
            assert len(IndexedDataset(str(output / "text"))) == manifest.documents == 150
        else:
            with pytest.raises(DataError, match="is no prepared dataset"):
                read_manifest(output)
    prepare(request(corpus, output, overwrite=True))
    assert read_manifest(output).documents == 150
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_the_manifest_is_plain_json(corpus, tmp_path):
    prepare(request(corpus, tmp_path / "out", max_documents=3))
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["documents"] == 3
    assert re.fullmatch("[0-9a-f]{64}", manifest["tokenizer_fingerprint"])


@pytest.mark.parametrize(
    ("option", "value"), [("vocab_size", 0), ("workers", 0), ("max_bad", -1), ("max_documents", 0)]
)
def test_numbers_out_of_range_are_refused_by_their_options(corpus, tmp_path, option, value):
    with pytest.raises(DataError, match=f"--{option.replace('_', '-')}: {value} must be at least"):
        request(corpus, tmp_path / "out", **{option: value})


def test_an_output_that_cannot_be_written_is_named(corpus):
    with pytest.raises(DataError, match="--output: /proc/nowhere/out cannot be written"):
        prepare(request(corpus, Path("/proc/nowhere/out")))
